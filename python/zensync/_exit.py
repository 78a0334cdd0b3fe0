"""The end of a process, and its forks. All States that live are closed at exit, within a bound.

A forked child has none of the threads that a State needs: there every State is marked, and says so
when used.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

EXIT_LIMIT_S = 5.0


class Closable(Protocol):
    """What is closed at exit and marked after a fork."""

    def close(self, timeout_s: float = ...) -> None: ...

    def mark_forked(self) -> None: ...


class Joinable(Protocol):
    """What must not run any more when the interpreter ends: there it would end the process."""

    def join(self, timeout_s: float) -> bool: ...


_live: weakref.WeakSet[Closable] = weakref.WeakSet()
_workers: weakref.WeakSet[Joinable] = weakref.WeakSet()


def register(state: Closable) -> None:
    """Closes `state` at exit, and marks it in forked children."""
    _live.add(state)


def register_worker(worker: Joinable) -> None:
    """Waits for `worker` at exit: its State may be gone, and closing on the worker's own thread."""
    _workers.add(worker)


def close_all() -> None:
    """Closes what is still open. The bound is for all together."""
    until = time.monotonic() + EXIT_LIMIT_S
    for state in list(_live):
        state.close(max(until - time.monotonic(), 0.2))
    for worker in list(_workers):
        worker.join(max(until - time.monotonic(), 0.2))


def _after_fork_in_child() -> None:
    _workers.clear()  # threads do not live here
    for state in list(_live):
        state.mark_forked()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
