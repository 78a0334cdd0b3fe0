"""The dense all-reduces of a State: a Gloo backend of its own, for the State's worker only.

Waits are cut into slices, so that the worker is never inside torch for long: a State can always be
closed, and no thread is left in a callback when the interpreter ends.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from . import _torch_compat
from .errors import Error, PeerLostError

_SPIN_S = 0.002  # polled this long before sleeping in slices: most small all-reduces end in it
_POLL_S = 0.00002
_SLICE_S = 0.05
_LAST_WAIT_S = 1.0  # for an all-reduce that all ranks have entered to end


class DenseGroup:
    """All-reduces over the ranks of one State. Opening is collective; size 1 sends nothing."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.size = size
        self.handed_bytes = 0
        self._cancelled = threading.Event()
        self._broken = False
        self._running: list[Any] = []
        self._gloo: Any = None
        if size > 1:
            self._gloo = _torch_compat.make_gloo(store, rank, size, timeout_s)

    def start(self, tensor: torch.Tensor) -> Any:
        """Starts the sum of a contiguous tensor, in place; `finish` what this returns."""
        if self._cancelled.is_set():
            raise Error("the State was closed before this all-reduce was started")
        self.handed_bytes += tensor.numel() * tensor.element_size()
        if self._broken:
            raise Error("the State has failed; make a new one")
        if self.size == 1 or tensor.numel() == 0:
            return None
        try:
            work = self._gloo.allreduce([tensor])
        except RuntimeError as why:
            raise PeerLostError(f"the dense all-reduce could not be started: {why}") from why
        self._running.append((work, tensor))
        return work

    def finish(self, work: Any) -> None:
        """Waits for the sum. PeerLostError if a peer is gone or the group's time-out has passed."""
        if work is None:
            return
        until = time.monotonic() + _SPIN_S
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        try:
            while not _torch_compat.wait_slice(work, _SLICE_S):
                if self._cancelled.is_set():
                    raise Error("the State was closed during this all-reduce")
        except Error:
            raise
        except RuntimeError as why:
            raise PeerLostError(f"the dense all-reduce failed: {why}") from why
        self._running = [entry for entry in self._running if entry[0] is not work]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a contiguous tensor over all ranks, in place."""
        self.finish(self.start(tensor))

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

        On the worker's thread, or after it has ended.
        """
        self._broken = True
        until = time.monotonic() + _LAST_WAIT_S
        while stuck := self._stuck():
            if self._cancelled.is_set() or time.monotonic() > until:
                break
            time.sleep(_SPIN_S)
        if stuck:  # the destructor would wait for it, up to the group's time-out
            _torch_compat.keep_forever(self._gloo)
            _torch_compat.keep_forever(stuck)
        self._running = []
        self._gloo = None

    def close(self) -> None:
        """Drops the connections for good."""
        self.cancel()
        self.break_off()

    def _stuck(self) -> list[Any]:
        return [entry for entry in self._running if not entry[0].is_completed()]
