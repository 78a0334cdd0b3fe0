"""Connecting a backend of torch, which nothing can cancel, on a thread that can be left.

Gloo waits for keys in the store and then for its peers' sockets; where one of them died in between,
that takes it several times its time-out. The caller waits beside it, asks whether all is well, and
leaves when it is not. What the thread waits for in the store then ends too; a socket it may wait
for longer, and what it makes in the end is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
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
    """`store`, whose waits end with `check`'s exception. For calls of torch's C++."""

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
    """One call of `make`, on a thread of its own; `future` has what it gives or raises."""

    def __init__(self, make: Callable[[dist.Store], T], store: dist.Store) -> None:
        self.future: Future[T] = Future()
        self._make = make
        self._store = _LeavableStore(store, self._check)
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name="zensync-connect", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self._is_left:
            raise _LeftError("nobody waits for this connection any more")

    def _run(self) -> None:
        try:
            self.future.set_result(self._make(self._store))
        except BaseException as why:
            self.future.set_exception(why)

    def leave(self) -> None:
        self._is_left = True
        _exit.register_worker(self)  # until its thread ends, that of the interpreter waits a while

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def connect(
    make: Callable[[dist.Store], T],
    store: dist.Store,
    check: Callable[[], None],
    end: Callable[[], None] = lambda: None,
) -> T:
    """`make(store)`, run on another thread over a store that can be left.

    check: called many times a second; what it raises ends the wait, as an interrupt does.
    end: called when nobody waits any more, for `make` to end soon where it can: its thread must not
    come back while the interpreter ends.
    """
    connecting = _Connecting(make, store)
    try:
        while not wait([connecting.future], _CHECK_S).done:
            check()
        return connecting.future.result()
    except BaseException:
        connecting.leave()
        end()
        raise
