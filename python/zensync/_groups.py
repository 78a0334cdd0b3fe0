"""What a State sends over besides its engine: a backend of its own for CPU tensors, opened with it,
and one for each type of device, opened when the first tensor there needs it (docs/adr/0011).

Only the State's worker opens and uses them, in the order of the State's calls, which is the same on
all ranks; so each collective meets its like.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import _core, _torch_compat
from ._connect import connect
from ._dense import ASK_S, DenseGroup, await_fault
from ._device import Lane, Passage, runtime
from .errors import Error, PeerLostError, UnsupportedError, make_error

CONNECT_TIMEOUT_S = 30.0  # once all ranks have come


@dataclass(frozen=True)
class Opener:
    """What it takes to open one more backend. keys: a prefix that no other State has."""

    group: dist.ProcessGroup
    keys: str
    engine: _core.Engine
    deadline_s: float


class Groups:
    """All backends of one State."""

    def __init__(self, cpu: DenseGroup, opener: Opener) -> None:
        self.cpu = cpu
        self._opener = opener
        self._lock = threading.Lock()  # for what follows
        self._devices: dict[str, DenseGroup] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._is_over = threading.Event()

    def passage(self, *tensors: torch.Tensor) -> Passage | None:
        """A call on the side stream of the device of `tensors`; None where they have none."""
        device = tensors[0].device
        if not runtime().takes(device):
            return None
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = Lane(device)
            return Passage(self._lanes[device], tensors)

    def of(self, device: torch.device) -> DenseGroup:
        """The backend for tensors on a device; the first time a collective call, of the worker."""
        if not runtime().takes(device):
            return self.cpu
        with self._lock:
            found = self._devices.get(device.type)
        if found is None:
            found = self._open(device)
            with self._lock:
                self._devices[device.type] = found
            if self._is_over.is_set():
                found.close()
        return found

    def _open(self, device: torch.device) -> DenseGroup:
        rank, size = self.cpu.rank, self.cpu.size
        engine, deadline_s = self._opener.engine, self._opener.deadline_s
        backend = None
        if size > 1:
            try:
                backend = self._connect(device, rank, size)
            except LookupError as why:
                text = f"a backend for tensors on {device.type} cannot be made: {why}"
                raise UnsupportedError(text, rank=rank) from why
            except Error:
                raise
            except RuntimeError as why:
                fault = await_fault(engine, ASK_S, self._is_over.is_set)
                text = f"the backend for tensors on {device.type} could not be opened: {why}"
                raise fault or PeerLostError(text) from why
        return DenseGroup(backend, engine, rank, size, deadline_s)

    def _connect(self, device: torch.device, rank: int, size: int) -> object:
        group, engine = self._opener.group, self._opener.engine
        name = _torch_compat.device_types(group).get(device.type, "gloo")
        timeout_s = self._opener.deadline_s
        # A client of its own: others wait in that of the group.
        client = _torch_compat.own_client(_torch_compat.group_store(group))
        store = dist.PrefixStore(f"{self._opener.keys}/{device.type}", client)

        def make(leavable: dist.Store) -> object:
            if name == "gloo":
                connect_s = min(timeout_s, CONNECT_TIMEOUT_S)
                return _torch_compat.make_gloo(leavable, rank, size, connect_s)
            # Threads of such a backend use its store for as long as it lives: not one of Python.
            backend = _torch_compat.make_backend(name, store, group, timeout_s)
            # Many connect in their first collective, which cannot be left: here, on this thread.
            first = torch.zeros(1, device=device)
            _torch_compat.start_all_reduce(backend, first, dist.ReduceOp.SUM, timeout_s).wait()
            runtime().synchronise(device)
            return backend

        def check() -> None:
            if self._is_over.is_set():
                raise Error("the State was closed before this call ended")
            if (known := engine.error) is not None:
                raise make_error(known)

        return connect(make, store, check)

    # ---- for all of them

    @property
    def _all(self) -> list[DenseGroup]:
        with self._lock:
            return [self.cpu, *self._devices.values()]

    @property
    def handed_bytes(self) -> int:
        """To dense all-reduces."""
        return sum(one.handed_bytes for one in self._all)

    def wire_count(self) -> tuple[int, int]:
        """Bytes sent and received, by the engine and by exchanges of device tensors."""
        sent, received = self._opener.engine.wire_count
        for one in self._all:
            sent, received = sent + one.sent_bytes, received + one.received_bytes
        return sent, received

    def cancel(self) -> None:
        """Makes collectives give up, from any thread."""
        self._is_over.set()
        for one in self._all:
            one.cancel()

    def break_off(self) -> None:
        """As of `DenseGroup`."""
        for one in self._all:
            one.break_off()

    def close(self) -> None:
        """Drops the connections for good."""
        self._is_over.set()
        for one in self._all:
            one.close()

    def forget(self) -> None:
        """In a forked child."""
        self._lock = threading.Lock()  # the parent may have held it
        for one in self._all:
            one.forget()
