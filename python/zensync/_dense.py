"""The dense all-reduces of a State: a Gloo backend of its own, for the State's worker only.

Waits are cut into slices, so that the worker is never inside torch for long: a State can always be
closed, and no thread is left in a callback when the interpreter ends. A tensor that Gloo may still
write is held until it does not, or for ever.
"""

from __future__ import annotations

import threading
import time
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
_ASK_S = 1.0  # for the mesh to say who is gone
_ASK_NAME = "(who broke the dense all-reduce)"


class DenseGroup:
    """All-reduces over the ranks of one State. Opening is collective; size 1 sends nothing.

    engine: the State's, whose mesh knows which rank is gone.
    """

    def __init__(
        self, store: dist.Store, engine: _core.Engine, rank: int, size: int, timeout_s: float
    ) -> None:
        self.size = size
        self._rank = rank
        self.handed_bytes = 0
        self._engine = engine
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # for what follows
        self._broken = False
        self._running: list[tuple[Any, torch.Tensor]] = []
        self._gloo: Any = None
        if size > 1:
            self._gloo = _torch_compat.make_gloo(store, rank, size, timeout_s)

    def start(self, tensor: torch.Tensor, op: Any = SUM) -> Any:
        """Starts the sum of a contiguous tensor, in place; `finish` what this returns."""
        if self._cancelled.is_set():
            raise Error("the State was closed before this all-reduce was started")
        with self._lock:
            if self._broken:
                raise Error("the State has failed; make a new one")
            self.handed_bytes += tensor.numel() * tensor.element_size()
            if self.size == 1 or tensor.numel() == 0:
                return None
            try:
                work = _torch_compat.start_all_reduce(self._gloo, tensor, op)
            except RuntimeError as why:
                failure = why
            else:
                self._running.append((work, tensor))
                return work
        raise self._lost("the dense all-reduce could not be started", failure) from failure

    def finish(self, work: Any) -> None:
        """Waits for the sum. The error names the rank that is gone, where the mesh knows it."""
        if work is None:
            return
        until = time.monotonic() + _SPIN_S
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        try:
            while not _torch_compat.wait_slice(work, _SLICE_S):
                if self._cancelled.is_set():
                    raise Error("the State was closed during this all-reduce")
                if (known := self._engine.error) is not None:
                    raise make_error(known)  # this rank gave up, or was told: nobody will come
        except Error:
            raise
        except RuntimeError as why:
            raise self._lost("the dense all-reduce failed", why) from why
        with self._lock:
            self._running = [entry for entry in self._running if entry[0] is not work]

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM) -> None:
        """Sums a contiguous tensor over all ranks, in place."""
        self.finish(self.start(tensor, op))

    def cancel(self) -> None:
        """Makes `start` and `finish` give up, from any thread."""
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

    def _lost(self, what: str, why: RuntimeError) -> Error:
        """What the mesh knows of it. Gloo names addresses, and often those of a healthy rank that
        left because of another; an idle mesh looks at its connections only when it is used."""
        if self._engine.error is None and not self._cancelled.is_set():
            spec = _core.TensorSpec(1, 1, _core.DType.F32, _core.Layout.DENSE)
            options = _core.JobOptions(_ASK_NAME, _core.ReduceOp.SUM)
            self._engine.agree([(_core.DenseTensor(0, spec), options, False)]).wait(_ASK_S)
        known = self._engine.error
        if known is not None and _ASK_NAME not in f"{known.message} {known.tensor}":
            return make_error(known)
        return PeerLostError(f"{what}: {why}")
