"""Counts over all ranks of a case: densities, union, skewness, the bound. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..lab.processes import host_of
from .patterns import Case, Units


@dataclass(frozen=True)
class Facts:
    """What is known of a case before it runs; equal on all ranks."""

    units_by_rank: tuple[int, ...]
    density: float  # mean over ranks
    union_density: float
    skewness: float
    bound_units: float  # units that the busiest card must move at least


class Counter:
    """Counts who holds which unit, rank after rank."""

    def __init__(self, case: Case, hosts: int) -> None:
        self._case, self._hosts = case, hosts
        self._contributors = np.zeros(case.units, dtype=np.int16)
        self._host_of_last = np.full(case.units, -1, dtype=np.int16)
        self._sizes: list[int] = []
        self._skews: list[float] = []

    def add(self, rank: int, units: Units) -> None:
        """Ranks come in order, so that those of one host are neighbours."""
        host = host_of(rank, self._case.ranks, self._hosts)
        fresh = units[self._host_of_last[units] != host]
        self._contributors[fresh] += 1
        self._host_of_last[units] = host
        self._sizes.append(units.size)
        if units.size:
            self._skews.append(skewness(units, self._case))

    def facts(self) -> Facts:
        """Of all ranks that were added."""
        held = self._contributors[self._contributors > 0].astype(np.float64)
        mean = float(np.mean(self._sizes)) / self._case.units
        return Facts(
            units_by_rank=tuple(self._sizes),
            density=mean,
            union_density=held.size / self._case.units,
            skewness=float(np.mean(self._skews)) if self._skews else 1.0,
            bound_units=float((held - 1 + self._hosts - 1).sum()) / self._hosts,
        )


def skewness(units: Units, case: Case) -> float:
    """Density of the densest of n equal ranges, over the density of the whole; of one rank."""
    ranges = min(case.ranks, case.units)
    bounds = np.arange(ranges + 1) * case.units // ranges
    counts = np.diff(np.searchsorted(units, bounds))
    return float((counts / np.diff(bounds)).max()) / (units.size / case.units)
