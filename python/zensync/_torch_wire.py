"""What the torch driver's link runs on: one c10d backend that only one State uses, of either kind.

Gloo, where the group's CPU backend is Gloo or it has none: waits are cancelled by closing the
connections, after which no memory is touched. Any other backend (MPI, a registered one), made as
torch would make it but over keys of the State's own: its works are polled, and since nothing says
when it lets go of memory, it never gets any of the core's.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from . import _torch_compat
from .errors import UnsupportedError

_TAG = 1  # of all messages: some backends ignore tags, so nothing may depend on them
_MOST_BYTES = 2**31 - 1  # MPI counts in ints, and so do libraries in its image
_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.001


class Wire(Protocol):
    """One backend. Messages between two ranks arrive in the order of the calls. What fails raises
    RuntimeError: torch's, with an address in place of a rank."""

    pads: bool
    """Whether a send and its receive must have equal counts."""
    lets_go: bool
    """Whether memory that was handed over is not touched any more once `drop` has returned."""

    def send(self, peer: int, tensor: torch.Tensor) -> Any: ...

    def recv(self, peer: int, tensor: torch.Tensor) -> Any: ...

    def wait(self, work: Any, timeout_s: float) -> None:
        """Until a send or a receive has ended. Once it has raised, the wire is of no use."""

    def drop(self) -> None:
        """Ends the connections; waits under way raise. From any thread, bounded, idempotent."""


class GlooWire:
    """A Gloo backend. `pads`: for tests of what other backends need."""

    lets_go = True

    def __init__(self, gloo: Any, rank: int, size: int, *, pads: bool = False) -> None:
        self.pads = pads
        self._gloo = gloo
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._dropped = False

    def send(self, peer: int, tensor: torch.Tensor) -> Any:
        return self._gloo.send([tensor], peer, _TAG)

    def recv(self, peer: int, tensor: torch.Tensor) -> Any:
        return self._gloo.recv([tensor], peer, _TAG)

    def wait(self, work: Any, timeout_s: float) -> None:
        # The whole time at once, because a wait that expires closes all connections. Rounded up,
        # so that it never expires before its time; 0 would mean the backend's own time-out.
        work.wait(timedelta(milliseconds=max(math.ceil(timeout_s * 1000), 1)))

    def drop(self) -> None:
        with self._lock:
            if not self._dropped:
                self._dropped = True
                _torch_compat.close_gloo(self._gloo, self._rank, self._size)


class OtherWire:
    """Any other backend; `name` is that of torch's registry."""

    lets_go = False

    def __init__(self, backend: Any, name: str) -> None:
        self.pads = name != "mpi"
        self._backend = backend
        self._dropped = threading.Event()

    def send(self, peer: int, tensor: torch.Tensor) -> Any:
        return self._backend.send([self._countable(tensor)], peer, _TAG)

    def recv(self, peer: int, tensor: torch.Tensor) -> Any:
        return self._backend.recv([self._countable(tensor)], peer, _TAG)

    def wait(self, work: Any, timeout_s: float) -> None:
        if not self._poll(work, timeout_s):
            raise RuntimeError(f"not finished within {timeout_s:.3g} s")

    def drop(self) -> None:
        if self._dropped.is_set():
            return
        self._dropped.set()
        with contextlib.suppress(Exception):  # few backends can, and each says it in its own way
            self._backend.abort()

    @staticmethod
    def _countable(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > _MOST_BYTES:
            raise OverflowError(
                f"a message of {tensor.numel()} bytes is more than this backend can count; make "
                "the State with a smaller max_bytes=, or use the native transport"
            )
        return tensor

    def _poll(self, work: Any, seconds: float) -> bool:
        """Whether `work` has ended; raises its error. Not its own wait: few honour a time-out, MPI
        holds its global lock meanwhile, and nothing would cancel it."""
        until = time.monotonic() + seconds
        pause = _FIRST_PAUSE_S
        while not work.is_completed():
            if self._dropped.is_set():
                raise RuntimeError("the connections were dropped here")
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
        work.wait()
        return True


def open_wire(group: dist.ProcessGroup, store: dist.Store, timeout_s: float) -> Wire:
    """A backend of the kind that `group` has for CPU tensors, over keys of `store` that nobody else
    uses. A collective call of the group's ranks. UnsupportedError, RuntimeError of torch."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = _torch_compat.cpu_backend_name(group) or "gloo"
    if name == "gloo":
        return GlooWire(_torch_compat.make_gloo(store, rank, size, timeout_s), rank, size)
    if name == "mpi" and size != dist.get_world_size():
        # MPI makes a communicator in a call of all its ranks; those outside the group make none.
        raise UnsupportedError(
            'ZENSYNC_TRANSPORT=torch cannot serve a sub-group of backend "mpi"; use the group of '
            "all ranks, or the native transport",
            rank=rank,
        )
    try:
        backend = _torch_compat.make_backend(name, store, group, timeout_s)
    except LookupError as why:
        raise UnsupportedError(
            f'ZENSYNC_TRANSPORT=torch cannot make a backend of kind "{name}": {why}; use the '
            "native transport",
            rank=rank,
        ) from why
    if isinstance(backend, dist.ProcessGroupGloo):
        return GlooWire(backend, rank, size, pads=True)
    return OtherWire(backend, name)
