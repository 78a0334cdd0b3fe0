"""Connecting a backend of torch, which nothing can cancel, on a thread that can be left.

Gloo waits for keys in the store and then for its peers' sockets; where one of them died in between,
that takes it several times its time-out. The caller waits beside it, asks whether all is well, and
leaves when it is not. What the thread waits for in the store then ends too; a socket it may wait
for longer, and what it makes in the end is dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from . import _exit
from ._attempt import poll

T = TypeVar("T")

_CHECK_S = 0.05
_KEY_TIMEOUT_S = 300.0  # for waits of torch that say none


class _LeftError(RuntimeError):
    """The caller has left."""


class _LeavableStore(dist.Store):
    """`store`, whose waits end with `check`'s exception. Torch calls it without the GIL's help."""

    def __init__(self, store: dist.Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._check = store, check

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = _KEY_TIMEOUT_S if timeout is None else timeout.total_seconds()
        for key in keys:
            if not poll(self._store, key, timeout_s, self._check):
                raise dist.DistStoreError(f"key {key} did not come within {timeout_s:.3g} s")


class _Connecting(Generic[T]):
    """One call of `make`, on a thread of its own."""

    def __init__(
        self, make: Callable[[dist.Store], T], store: dist.Store, discard: Callable[[T], None]
    ) -> None:
        self._make, self._discard = make, discard
        self._store = _LeavableStore(store, self._check)
        self._lock = threading.Lock()  # for what follows
        self._is_left = False
        self._made: list[T] = []
        self._raised: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zensync-connect", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self._is_left:
            raise _LeftError("nobody waits for this connection any more")

    def _run(self) -> None:
        try:
            made = self._make(self._store)
        except BaseException as why:
            self._raised = why
        else:
            with self._lock:
                is_left = self._is_left
                if not is_left:
                    self._made.append(made)
            if is_left:
                with contextlib.suppress(RuntimeError):
                    self._discard(made)
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """Once it has ended."""
        if self._raised is not None:
            raise self._raised
        return self._made.pop()

    def leave(self) -> None:
        with self._lock:
            self._is_left = True
            made, self._made = self._made, []
        _exit.register_worker(self)  # until its thread ends, that of the interpreter waits a while
        for one in made:
            self._discard(one)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def connect(
    make: Callable[[dist.Store], T],
    store: dist.Store,
    check: Callable[[], None],
    discard: Callable[[T], None] = lambda _: None,
    end: Callable[[], None] = lambda: None,
) -> T:
    """`make(store)`, run on another thread over a store that can be left.

    check: called many times a second; what it raises ends the wait, as an interrupt does.
    discard: called with what `make` gives although nobody waits any more. end: called when nobody
    does, for `make` to end soon where it can: its thread must not come back while the interpreter
    ends.
    """
    connecting = _Connecting(make, store, discard)
    try:
        while not connecting.wait(_CHECK_S):
            check()
        return connecting.result()
    except BaseException:
        connecting.leave()
        end()
        raise
