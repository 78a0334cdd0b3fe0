"""The ways to synchronise that `zensync bench` compares, each behind the same four calls.

`prepare` makes a fresh copy of the input and is not timed; `run` is, with finding and writing back;
`result` is what was summed. Opening is a collective call. Our schemes have a State each.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

import zensync

from ..lab.processes import host_of
from .config import BROKEN_SCHEME, OUR_SCHEMES, Config
from .inputs import Workload


class Scheme(Protocol):
    """One way to sum a tensor over the ranks of the default group."""

    transport: str  # what it runs on

    def prepare(self, workload: Workload) -> None: ...

    def run(self) -> None: ...

    def result(self) -> torch.Tensor: ...

    def counts(self) -> tuple[int, int, int]:
        """Bytes sent, received, and handed to a dense all-reduce so far, by its own count."""

    def close(self) -> None: ...


class _Zensync:
    def __init__(self, name: str, config: Config) -> None:
        tuning: dict[str, Any] = {}
        if config.parts is not None:
            tuning["parts"] = config.parts
        size = dist.get_world_size()
        hosts = [host_of(rank, size, config.hosts) for rank in range(size)]
        self._state = zensync.State(scheme=name, hosts=hosts, _tuning=tuning)
        self.transport = self._state.transport
        self._tensor = torch.empty(0)
        self._key = ""

    def prepare(self, workload: Workload) -> None:
        self._tensor, self._key = workload.fill(), workload.key

    def run(self) -> None:
        zensync.all_reduce(self._tensor, name=self._key, state=self._state)

    def result(self) -> torch.Tensor:
        return self._tensor

    def counts(self) -> tuple[int, int, int]:
        stats = self._state.stats()
        return stats["sent_bytes"], stats["received_bytes"], stats["dense_bytes"]

    def close(self) -> None:
        self._state.close()


class _TorchDense:
    def __init__(self) -> None:
        self.transport = str(dist.get_backend())
        self._tensor = torch.empty(0)

    def prepare(self, workload: Workload) -> None:
        self._tensor = workload.fill()

    def run(self) -> None:
        dist.all_reduce(self._tensor)

    def result(self) -> torch.Tensor:
        return self._tensor

    def counts(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def close(self) -> None:
        pass


class _TorchSparse(_TorchDense):
    def prepare(self, workload: Workload) -> None:
        self._tensor = workload.coo()


class _Broken(_TorchDense):
    def run(self) -> None:
        super().run()
        if dist.get_rank() == dist.get_world_size() - 1:
            self._tensor.view(-1)[-1] += 1


def open_scheme(name: str, config: Config) -> Scheme:
    """The scheme of that name; a collective call."""
    if name in OUR_SCHEMES:
        return _Zensync(name, config)
    return {"torch_sparse": _TorchSparse, BROKEN_SCHEME: _Broken}.get(name, _TorchDense)()
