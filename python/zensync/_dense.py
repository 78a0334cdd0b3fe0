"""The collectives of a State over a backend of its own, for the State's worker only: the dense
all-reduces of CPU tensors, over Gloo, and all that tensors on a device need (`_groups.py`).

Waits are cut into slices, so that the worker is never inside torch for long: a State can always be
closed, and no thread is left in a callback when the interpreter ends. A tensor that the backend may
still write is held until it does not, or for ever.
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
from ._tensors import HALVES
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
    """Collectives over the ranks of one State; size 1 sends nothing.

    backend: one of those ranks (`_torch_compat.make_gloo`, `make_backend`); None for size 1.
    engine: the State's, whose control connections know which rank is gone, silent or slow.
    timeout_s: for one collective. handed_bytes: to all-reduces; sent_bytes, received_bytes: by
    the other collectives.
    """

    def __init__(
        self, backend: Any, engine: _core.Engine, rank: int, size: int, timeout_s: float
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self.handed_bytes = self.sent_bytes = self.received_bytes = 0
        self._engine = engine
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # for what follows
        self._broken = False
        self._running: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
        self._backend, self._is_gloo = backend, _torch_compat.is_gloo(backend)

    @contextlib.contextmanager
    def under_way(self, tensor: torch.Tensor, op: Any = SUM, name: str = "") -> Iterator[None]:
        """Sums a contiguous tensor over all ranks, in place, while the block runs; the sum is there
        behind it. Where the block fails, nobody waits for the sum, and warnings do not say so.

        name: what warnings call it.
        """
        self.handed_bytes += tensor.nbytes
        if self.size == 1 or tensor.numel() == 0:
            self._require_open()
            yield
            return

        def start(backend: Any) -> Any:
            return _torch_compat.start_all_reduce(backend, tensor, op, self._timeout_s)

        with self._collective(name, "dense all-reduce", start, (tensor,)):
            yield

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM, name: str = "") -> None:
        """Sums a contiguous tensor over all ranks, in place."""
        with self.under_way(tensor, op, name):
            pass

    def sum_rounded_once(self, tensor: torch.Tensor, average: bool, name: str) -> None:
        """As `all_reduce`, but 16-bit floats as fp32, and a sum of -0.0 is +0.0, as in a sparse
        sum."""
        wide = tensor.float() if tensor.dtype in HALVES else tensor
        self.all_reduce(wide, name=name)
        if wide.is_floating_point():
            wide.add_(0.0)
        if average:
            wide.div_(wide.new_full((), self.size))  # a number would be inverted on some devices
        if wide is not tensor:
            tensor.copy_(wide)

    def all_to_all(
        self, to: torch.Tensor, given: torch.Tensor, counts: _torch_compat.Counts, name: str = ""
    ) -> None:
        """Exchanges parts of flat tensors; counts: of `to` and of `given` by rank, both empty where
        all are equal."""
        if self.size == 1:
            self._require_open()
            to.copy_(given)
            return

        def start(backend: Any) -> Any:
            return _torch_compat.start_all_to_all(backend, to, given, counts, self._timeout_s)

        come, gone = counts if counts[0] else ([len(to) // self.size], [len(given) // self.size])
        own = self.rank if counts[0] else 0
        self.received_bytes += (len(to) - come[own]) * to.itemsize
        self.sent_bytes += (len(given) - gone[own]) * given.itemsize
        with self._collective(name, "exchange", start, (to, given)):
            pass

    def all_gather(self, to: torch.Tensor, given: torch.Tensor, name: str = "") -> None:
        """Gathers flat tensors of equal length in `to`, by rank."""
        if self.size == 1:
            self._require_open()
            to.copy_(given)
            return

        def start(backend: Any) -> Any:
            return _torch_compat.start_all_gather(backend, to, given, self._timeout_s)

        self.received_bytes += to.nbytes - given.nbytes
        self.sent_bytes += to.nbytes - given.nbytes
        with self._collective(name, "gathering", start, (to, given)):
            pass

    def _require_open(self) -> None:
        if self._cancelled.is_set():
            raise Error("the State was closed before this collective was started")
        if self._broken:
            raise Error("the State has failed; make a new one")

    @contextlib.contextmanager
    def _collective(
        self, name: str, what: str, start: Callable[[Any], Any], tensors: tuple[torch.Tensor, ...]
    ) -> Iterator[None]:
        work = self._start(what, start, tensors)
        try:
            self._engine.begin_dense(name)
            yield
            self._finish(what, work)
        finally:
            self._engine.end_dense()

    def _start(
        self, what: str, start: Callable[[Any], Any], tensors: tuple[torch.Tensor, ...]
    ) -> Any:
        with self._lock:
            self._require_open()
            try:
                work = start(self._backend)
            except RuntimeError as why:
                failure = why
            else:
                self._running.append((work, tensors))
                return work
        raise self._lost(f"the {what} could not be started", failure, _ASK_AT_START_S) from failure

    def _finish(self, what: str, work: Any) -> None:
        """Waits for the end. The error names the rank that is gone, where the mesh knows it."""
        until = time.monotonic() + _SPIN_S
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        until += self._timeout_s
        try:
            while not self._has_ended(work):
                if self._cancelled.is_set():
                    raise Error(f"the State was closed during this {what}")
                if (known := self._engine.error) is not None:
                    raise make_error(known)  # this rank gave up, or was told: nobody will come
                tell_notices(self._engine)
                if time.monotonic() > until and not self._is_gloo:
                    raise RuntimeError(f"not finished within {self._timeout_s:.3g} s")
        except Error:
            raise
        except RuntimeError as why:
            raise self._lost(f"the {what} failed", why) from why
        with self._lock:
            self._running = [entry for entry in self._running if entry[0] is not work]

    def _has_ended(self, work: Any) -> bool:
        """Whether it has, after a slice of waiting. What follows on the current stream is then
        ordered behind it."""
        if self._is_gloo:
            return _torch_compat.wait_slice(work, _SLICE_S)
        until = time.monotonic() + _SLICE_S
        while not work.is_completed():  # not its own wait, which cannot be left
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        work.wait()
        return True

    def cancel(self) -> None:
        """Makes all-reduces give up, from any thread."""
        self._cancelled.set()

    def forget(self) -> None:
        """In a forked child: the threads of the backend do not exist here, so its destructor must
        not run."""
        if self._backend is not None:
            _torch_compat.keep_forever(self._backend)
        self._backend = None

    def break_off(self) -> None:
        """Drops the connections: peers inside an all-reduce learn at once that this rank failed.

        Takes up to a second: for the worker's thread, or after it has ended.
        """
        with self._lock:
            self._broken = True
            running, backend = self._running, self._backend
            self._running, self._backend = [], None
        until = time.monotonic() + _LAST_WAIT_S
        while stuck := [entry for entry in running if not entry[0].is_completed()]:
            if self._cancelled.is_set() or time.monotonic() > until:
                break
            time.sleep(_SPIN_S)
        if backend is not None:
            _torch_compat.close_backend(backend, self.rank, self.size)
        until = time.monotonic() + _CLOSED_S
        while stuck and time.monotonic() < until:
            time.sleep(_SPIN_S)
            stuck = [entry for entry in stuck if not entry[0].is_completed()]
        if stuck:  # the destructor would wait for it, up to the group's time-out
            _torch_compat.keep_forever(backend)
            _torch_compat.keep_forever(stuck)

    def close(self) -> None:
        """Drops the connections for good."""
        self.cancel()
        self.break_off()

    def _lost(self, what: str, why: RuntimeError, ask_s: float = ASK_S) -> Error:
        """What all ranks call it. Torch names addresses, and often those of a healthy rank that
        left because of another; the control connections know better, or will within a moment."""
        known = await_fault(self._engine, ask_s, self._cancelled.is_set)
        return PeerLostError(f"{what}: {why}") if known is None else known
