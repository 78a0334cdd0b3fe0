"""The worker of a State: one thread that finishes its calls, in the order in which they were made.

It waits for the engine's jobs (without the GIL), issues the dense all-reduces, and completes
futures, whose callbacks run on it. A daemon thread: the interpreter does not wait for it,
`zensync._exit` does, with a bound.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from . import _exit
from ._device import Passage
from .errors import Error

WAITS_FOR_ITSELF = (
    "{what} in a callback of one of this State's futures would wait for itself; use async_op=True "
    "or wait outside the callback"
)


def as_error(why: BaseException, rank: int | None = None) -> Error:
    """`why` as an error of zensync; defects keep their own text and cause, `rank` caused them."""
    if isinstance(why, Error):
        return why
    error = Error(f"{type(why).__name__} while synchronising: {why}", rank=rank, culprit=rank)
    error.__cause__ = why
    return error


class Pending:
    """One call under way: `future` and `wait` end with the value or the error of `run`.

    worker: the thread that runs it. passage: of a call on tensors of a device, whose side stream
    then runs it.
    """

    def __init__(
        self,
        run: Callable[[], Any],
        worker: threading.Thread | None = None,
        passage: Passage | None = None,
    ) -> None:
        self.run: Callable[[], Any] | None = run
        self.future: torch.futures.Future[Any] = (
            torch.futures.Future() if passage is None else passage.future
        )
        self._passage = passage
        self.value: Any = None
        self.error: Error | None = None
        self._worker = worker
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the call has ended, after waiting for it at most `timeout_s`. What it gave the
        device is then waited for by the current stream.

        Error on the worker's thread, if it has not ended: it never would.
        """
        if not self._ended.is_set() and threading.current_thread() is self._worker:
            raise Error(WAITS_FOR_ITSELF.format(what="waiting for a call"))
        if not self._ended.wait(timeout_s):
            return False
        if self._passage is not None and self.error is None:
            self._passage.join(self.value)
        return True

    def done(self) -> bool:
        return self._ended.is_set()

    def end(self, value: Any, error: Error | None) -> None:
        """Once only; what `run` held (tensors) is let go."""
        with contextlib.ExitStack() as stack:
            if self._passage is not None:
                try:
                    stack.enter_context(self._passage.ending())
                except RuntimeError as why:  # of the device
                    value, error = None, error or as_error(why)
            self._end(value, error)

    def _end(self, value: Any, error: Error | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self.run = None
            self.value, self.error = value, error
            self._ended.set()
        with contextlib.suppress(RuntimeError):  # somebody else completed the future
            if error is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(error)

    def call(self) -> Any:
        """Runs it, once."""
        run, self.run = self.run, None
        if run is None:
            return None
        if self._passage is None:
            return run()
        with self._passage.running():
            return run()


class Worker:
    """A thread and its queue. Nothing that a call or a callback raises ends the thread."""

    def __init__(self, name: str) -> None:
        self.busy_s = 0.0  # time in which at least one call was under way
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way: set[Pending] = set()
        self._busy_since = 0.0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        _exit.register_worker(self)

    def submit(self, run: Callable[[], Any], passage: Passage | None = None) -> Pending:
        """Queues `run`; its value completes the Pending. passage: as of `Pending`."""
        pending = Pending(run, self._thread, passage)
        with self._lock:
            if not self._under_way:
                self._busy_since = time.monotonic()
            self._under_way.add(pending)
        self._queue.put(pending)
        return pending

    def is_current(self) -> bool:
        """Whether this is the worker's own thread: a call, or a callback of a future."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Ends the thread once all that was queued has ended."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether all calls have ended, and the thread with them.

        On the worker's own thread (a callback) nothing is waited for.
        """
        if self.is_current():
            with self._lock:
                return not self._under_way
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail_all(self, error: Error) -> None:
        """Ends every call that is still under way, for when the thread cannot."""
        with self._lock:
            left = list(self._under_way)
        for pending in left:
            self._end(pending, None, error)

    def _loop(self) -> None:
        torch.set_flush_denormal(False)  # a thread inherits it; sums are exact
        while (pending := self._queue.get()) is not None:
            value, error = self._run(pending)
            with contextlib.suppress(BaseException):  # of callbacks: their own futures have it
                self._end(pending, value, error)
            del pending, value, error  # an idle worker keeps nothing alive

    def _run(self, pending: Pending) -> tuple[Any, Error | None]:
        """Value and error of a call. What it refers to is let go before anybody learns the end."""
        try:
            return pending.call(), None
        except BaseException as why:  # every future ends, whatever happened
            return None, as_error(why)

    def _end(self, pending: Pending, value: Any, error: Error | None) -> None:
        with self._lock:
            if pending in self._under_way:
                self._under_way.remove(pending)
                if not self._under_way:
                    self.busy_s += time.monotonic() - self._busy_since
        pending.end(value, error)
