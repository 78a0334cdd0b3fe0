"""What one rank of a case holds: the tensor to be summed, and the exact sum of all ranks.

Each rank works out the sum by itself, without any synchronisation; see values.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .config import Config
from .facts import Counter, Facts
from .patterns import Case, Units, units_of
from .values import values_of


@dataclass
class Workload:
    """One case on one rank. `scratch` is what the schemes sum in place, one at a time."""

    key: str
    case: Case
    row: int
    units: Units
    input: torch.Tensor
    scratch: torch.Tensor
    reference: torch.Tensor
    facts: Facts

    def fill(self) -> torch.Tensor:
        """A fresh copy of the input."""
        return self.scratch.copy_(self.input)

    def coo(self) -> torch.Tensor:
        """A fresh copy of the input as a coalesced COO tensor, rows as entries."""
        rows = torch.from_numpy(self.units)
        return torch.sparse_coo_tensor(
            rows[None].clone(), self.input[rows], self.input.shape,
            is_coalesced=True, check_invariants=False,
        )  # fmt: skip

    def wrong(self, result: torch.Tensor) -> int:
        """Elements of `result` unlike the exact sum; all, if its shape is another."""
        if result.shape != self.reference.shape or result.dtype != self.reference.dtype:
            return self.reference.numel()
        whole = result.to_dense() if result.layout == torch.sparse_coo else result
        return int((whole != self.reference).sum())


def make_workload(config: Config, size: int, case: Case, rank: int) -> Workload:
    """A case as `rank` sees it. PatternError if it cannot be had."""
    dtype = getattr(torch, config.dtype)
    shape = (case.units, config.row) if config.row > 1 else (case.units,)
    total = np.zeros((case.units, config.row), dtype=np.int16)
    counter = Counter(case, config.hosts)
    own: Units | None = None
    tensor = torch.zeros(shape, dtype=dtype)
    for other in range(case.ranks):
        units = units_of(case, other)
        values = values_of(units, config.row, other, case)
        total[units] += values
        counter.add(other, units)
        if other == rank:
            own = units
            rows = torch.from_numpy(values).to(dtype)
            tensor[torch.from_numpy(units)] = rows.reshape(units.size, *shape[1:])
    assert own is not None
    return Workload(
        key=f"{case.pattern} {case.density:g} of {size} {config.dtype}",
        case=case,
        row=config.row,
        units=own,
        input=tensor,
        scratch=torch.empty_like(tensor),
        reference=torch.from_numpy(total).reshape(shape).to(dtype),
        facts=counter.facts(),
    )
