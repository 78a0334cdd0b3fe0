"""The dense all-reduces of a State: a Gloo backend of its own, for the State's worker only.

Waits are cut into slices, so that the worker is never inside torch for long: a State can always be
closed, and no thread is left in a callback when the interpreter ends. A tensor that Gloo may still
write is held until it does not, or for ever.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _torch_compat
from .errors import Error, PeerLostError, make_error

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

_SPIN_S = 0.002  # polled this long before sleeping in slices: most small all-reduces end in it
_POLL_S = 0.00002
_SLICE_S = 0.05
_LAST_WAIT_S = 1.0  # for an all-reduce that all ranks have entered to end
_CLOSED_S = 0.2  # for what is left to end once the connections are closed
ASK_S = 1.0  # for the control connections to say who is gone
_ASK_AT_START_S = 0.3  # less, so that the rank with the cause speaks before those it breaks off


_logger = logging.getLogger("zensync.net")


def tell_notices(engine: _core.Engine) -> None:
    """Logs what the heartbeats say of ranks that are waited for, as warnings."""
    for text in engine.take_notices():
        _logger.warning("zensync: %s", text)


def await_fault(
    engine: _core.Engine, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
) -> Error | None:
    """What all ranks call the fault, which the control connections know within a moment; None if
    they know of none after `timeout_s`, or it was cancelled."""
    until = time.monotonic() + timeout_s
    while engine.error is None and time.monotonic() < until and not is_cancelled():
        time.sleep(_SPIN_S)
    known = engine.settled()
    return None if known is None else make_error(known)


class DenseGroup:
    """All-reduces over the ranks of one State; size 1 sends nothing.

    gloo: a backend of those ranks (`_torch_compat.make_gloo`); None for size 1. engine: the
    State's, whose control connections know which rank is gone, silent or slow. timeout_s: for one
    all-reduce.
    """

    def __init__(
        self, gloo: Any, engine: _core.Engine, rank: int, size: int, timeout_s: float
    ) -> None:
        self.size = size
        self._rank = rank
        self._timeout_s = timeout_s
        self.handed_bytes = 0
        self._engine = engine
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # for what follows
        self._broken = False
        self._running: list[tuple[Any, torch.Tensor]] = []
        self._gloo = gloo

    @contextlib.contextmanager
    def under_way(self, tensor: torch.Tensor, op: Any = SUM, name: str = "") -> Iterator[None]:
        """Sums a contiguous tensor over all ranks, in place, while the block runs; the sum is there
        behind it. Where the block fails, nobody waits for the sum, and warnings do not say so.

        name: what warnings call it.
        """
        work = self._start(tensor, op)
        if work is None:
            yield
            return
        try:
            self._engine.begin_dense(name)
            yield
            self._finish(work)
        finally:
            self._engine.end_dense()

    def _start(self, tensor: torch.Tensor, op: Any) -> Any:
        if self._cancelled.is_set():
            raise Error("the State was closed before this all-reduce was started")
        with self._lock:
            if self._broken:
                raise Error("the State has failed; make a new one")
            self.handed_bytes += tensor.numel() * tensor.element_size()
            if self.size == 1 or tensor.numel() == 0:
                return None
            try:
                work = _torch_compat.start_all_reduce(self._gloo, tensor, op, self._timeout_s)
            except RuntimeError as why:
                failure = why
            else:
                self._running.append((work, tensor))
                return work
        what = "the dense all-reduce could not be started"
        raise self._lost(what, failure, _ASK_AT_START_S) from failure

    def _finish(self, work: Any) -> None:
        """Waits for the sum. The error names the rank that is gone, where the mesh knows it."""
        until = time.monotonic() + _SPIN_S
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        try:
            while not _torch_compat.wait_slice(work, _SLICE_S):
                if self._cancelled.is_set():
                    raise Error("the State was closed during this all-reduce")
                if (known := self._engine.error) is not None:
                    raise make_error(known)  # this rank gave up, or was told: nobody will come
                tell_notices(self._engine)
        except Error:
            raise
        except RuntimeError as why:
            raise self._lost("the dense all-reduce failed", why) from why
        with self._lock:
            self._running = [entry for entry in self._running if entry[0] is not work]

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM, name: str = "") -> None:
        """Sums a contiguous tensor over all ranks, in place."""
        with self.under_way(tensor, op, name):
            pass

    def cancel(self) -> None:
        """Makes all-reduces give up, from any thread."""
        self._cancelled.set()

    def forget(self) -> None:
        """In a forked child: Gloo's threads do not exist here, so its destructor must not run."""
        if self._gloo is not None:
            _torch_compat.keep_forever(self._gloo)
        self._gloo = None

    def break_off(self) -> None:
        """Drops the connections: peers inside an all-reduce learn at once that this rank failed.

        Takes up to a second: for the worker's thread, or after it has ended.
        """
        with self._lock:
            self._broken = True
            running, gloo = self._running, self._gloo
            self._running, self._gloo = [], None
        until = time.monotonic() + _LAST_WAIT_S
        while stuck := [entry for entry in running if not entry[0].is_completed()]:
            if self._cancelled.is_set() or time.monotonic() > until:
                break
            time.sleep(_SPIN_S)
        if gloo is not None:
            _torch_compat.close_gloo(gloo, self._rank, self.size)
        until = time.monotonic() + _CLOSED_S
        while stuck and time.monotonic() < until:
            time.sleep(_SPIN_S)
            stuck = [entry for entry in stuck if not entry[0].is_completed()]
        if stuck:  # the destructor would wait for it, up to the group's time-out
            _torch_compat.keep_forever(gloo)
            _torch_compat.keep_forever(stuck)

    def close(self) -> None:
        """Drops the connections for good."""
        self.cancel()
        self.break_off()

    def _lost(self, what: str, why: RuntimeError, ask_s: float = ASK_S) -> Error:
        """What all ranks call it. Gloo names addresses, and often those of a healthy rank that
        left because of another; the control connections know better, or will within a moment."""
        known = await_fault(self._engine, ask_s, self._cancelled.is_set)
        return PeerLostError(f"{what}: {why}") if known is None else known
