"""What ranks tell each other for `observe`: texts in the group's store, and one timed all-reduce.

To put something there waits for nobody. Uses a client of its own (`_torch_compat.own_client`) and
holds the group's, so that a store which this process serves lives on when the group is destroyed.
"""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import _torch_compat
from ._mesh import lock_of
from .bench.figures import ring_bytes
from .errors import Error, MismatchError

_TIMEOUT_S = 300.0  # for a rank that is late to observe()
_VALUE_BYTES = 4 << 20  # a TCPStore takes 8 MiB at once
_PROBE_BYTES, _PROBES = 4 << 20, 3


class NoticeBoard:
    """Keys of one observation in a group's store; nothing where there is one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = 0, 1
        self._store: Any = None
        if group is None or dist.get_world_size(group) == 1:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = min(_torch_compat.group_timeout_s(group, _TIMEOUT_S), _TIMEOUT_S)
        with lock_of(group):
            self._held = _torch_compat.group_store(group)
            own = _torch_compat.own_client(self._held)
            # Counted by the store, which may live longer than the group.
            number = own.add(f"zensync/observe made/{self.rank}", 1)
            self._store = dist.PrefixStore(f"zensync/observe/{number}", own)

    def require_equal(self, text: str) -> None:
        """MismatchError unless all ranks say the same. Error if one does not come."""
        if self._store is None:
            return
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(f"digest/{self.rank}", digest)
        keys = [f"digest/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as why:
            raise Error(f"not all ranks called observe(): {why}") from why
        if any(self._store.get(key).decode() != digest for key in keys):
            raise MismatchError("arguments or parameters of observe() differ between ranks")

    def put(self, packed: bytes) -> None:
        """What this rank has to tell, once."""
        if self._store is None:
            return
        pieces = range(0, len(packed), _VALUE_BYTES)
        for number, begin in enumerate(pieces):
            self._store.set(f"{self.rank}/{number}", packed[begin : begin + _VALUE_BYTES])
        self._store.set(f"{self.rank}/pieces", str(len(pieces)))

    def take(self, timeout_s: float) -> list[bytes | None]:
        """What each rank told; None for this one. RuntimeError that names a rank which did not."""
        until = time.monotonic() + timeout_s
        return [
            None if rank == self.rank else self._take_one(rank, until) for rank in range(self.size)
        ]

    def _take_one(self, rank: int, until: float) -> bytes:
        key = f"{rank}/pieces"
        try:
            left_s = max(until - time.monotonic(), 0.01)
            self._store.wait([key], timedelta(seconds=left_s))
            count = int(self._store.get(key))
            return b"".join(self._store.get(f"{rank}/{number}") for number in range(count))
        except RuntimeError as why:
            text = str(why).partition("\n")[0]
            raise RuntimeError(f"rank {rank} has not ended its observation ({text})") from why


def time_link(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bits per second of the slowest rank in the group's own all-reduce, the best of a few."""
    size = dist.get_world_size(group)
    tensor = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    best_s = float("inf")
    for _ in range(_PROBES):
        _reduce(group, tensor[:1024].clone())  # so that all start together
        start = time.monotonic()
        _reduce(group, tensor)
        taken = torch.tensor([time.monotonic() - start], dtype=torch.float32, device=device)
        best_s = min(best_s, float(_reduce(group, taken)))
    return ring_bytes(_PROBE_BYTES, size) * 8 / max(best_s, 1e-9)


def _reduce(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    """The largest of each element over ranks, in place, once it is there."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor
