"""The worker of a State: one thread that finishes its calls, in the order in which they were made.

It waits for the engine's jobs (without the GIL), issues the dense all-reduces, and completes
futures. A daemon
thread: the interpreter does not wait for it, `zensync._exit` does, with a bound.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .errors import Error


def as_error(why: BaseException) -> Error:
    """`why` as an error of zensync; defects keep their own text and cause."""
    if isinstance(why, Error):
        return why
    error = Error(f"{type(why).__name__} while synchronising: {why}")
    error.__cause__ = why
    return error


class Pending:
    """One call under way: `future` and `wait` end with the value or the error of `run`."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run: Callable[[], Any] | None = run
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.value: Any = None
        self.error: Error | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the call has ended, after waiting for it at most `timeout_s`."""
        return self._ended.wait(timeout_s)

    def done(self) -> bool:
        return self._ended.is_set()

    def end(self, value: Any, error: Error | None) -> None:
        """Once only; what `run` held (tensors) is let go."""
        with self._lock:
            if self._ended.is_set():
                return
            self.run = None
            self.value, self.error = value, error
            self._ended.set()
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


class Worker:
    """A thread and its queue. `on_error` hears of every error, on the worker's thread."""

    def __init__(self, name: str, on_error: Callable[[Error], None]) -> None:
        self.busy_s = 0.0  # time in which at least one call was under way
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way: set[Pending] = set()
        self._busy_since = 0.0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any]) -> Pending:
        """Queues `run`; its value completes the Pending."""
        pending = Pending(run)
        with self._lock:
            if not self._under_way:
                self._busy_since = time.monotonic()
            self._under_way.add(pending)
        self._queue.put(pending)
        return pending

    def stop(self) -> None:
        """Ends the thread once all that was queued has ended."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended. From the worker itself (a callback): False, at once."""
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail_all(self, error: Error) -> None:
        """Ends every call that is still under way, for when the thread cannot."""
        with self._lock:
            left = list(self._under_way)
        for pending in left:
            self._end(pending, None, error)

    def _loop(self) -> None:
        while (pending := self._queue.get()) is not None:
            value, error = None, None
            try:
                if pending.run is not None:
                    value = pending.run()
            except BaseException as why:  # every future ends, whatever happened
                error = as_error(why)
                self._on_error(error)
            self._end(pending, value, error)

    def _end(self, pending: Pending, value: Any, error: Error | None) -> None:
        with self._lock:
            if pending in self._under_way:
                self._under_way.remove(pending)
                if not self._under_way:
                    self.busy_s += time.monotonic() - self._busy_since
        pending.end(value, error)
