"""Which elements (or rows) of a tensor are non-zero on each rank: the patterns of `zensync bench`.

Every pattern is a function of (pattern, units, density, rank, seed) alone: a run repeats exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int64]

PATTERNS = ("uniform", "front", "zipf", "clustered", "strided")
_FRONT_DECAY = 6.0
_ZIPF_EXPONENT = 1.1
_CLUSTER_UNITS = 256
_STRIDE = 64


@dataclass(frozen=True)
class Case:
    """`density` of `units` units are non-zero on each of `ranks` ranks, placed by `pattern`."""

    pattern: str
    units: int
    density: float
    ranks: int
    seed: int = 0


def front_scale(density: float) -> float:
    """s such that min(1, s·exp(−6x)) has the mean `density` over x in [0, 1)."""
    x = (np.arange(20000) + 0.5) / 20000
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        mean = float(np.minimum(1.0, middle * np.exp(-_FRONT_DECAY * x)).mean())
        low, high = (middle, high) if mean < density else (low, middle)
    return low


def units_of(case: Case, rank: int) -> Units:
    """The non-zero units of `rank`, ascending: int64."""
    rng = np.random.default_rng([case.seed, rank])
    wanted = max(1, round(case.units * case.density))
    if case.pattern == "uniform":
        mask = rng.random(case.units) < case.density
    elif case.pattern == "front":
        x = np.arange(case.units) / case.units
        mask = rng.random(case.units) < front_scale(case.density) * np.exp(-_FRONT_DECAY * x)
    elif case.pattern == "zipf":
        return _zipf(case.units, wanted, rng)
    elif case.pattern == "clustered":
        runs = max(1, wanted // _CLUSTER_UNITS)
        starts = rng.choice(max(1, case.units - _CLUSTER_UNITS), size=runs, replace=False)
        return np.unique((starts[:, None] + np.arange(_CLUSTER_UNITS)).ravel()).astype(np.int64)
    elif case.pattern == "strided":
        stride = max(1, min(_STRIDE, math.floor(1 / case.density)))
        return np.arange(rank % stride, case.units, stride, dtype=np.int64)[:wanted]
    else:
        raise ValueError(f"no pattern is called {case.pattern!r}; there are {', '.join(PATTERNS)}")
    return np.flatnonzero(mask).astype(np.int64)


def _zipf(units: int, wanted: int, rng: np.random.Generator) -> Units:
    """`wanted` distinct units drawn with popularity 1/(i + 1)^1.1: the popular ones come first."""
    weights = (np.arange(units) + 1.0) ** -_ZIPF_EXPONENT
    cumulative = np.cumsum(weights)
    found = np.zeros(0, dtype=np.int64)
    while found.size < wanted:
        draws = rng.random(2 * wanted) * cumulative[-1]
        found = np.union1d(found, np.searchsorted(cumulative, draws).astype(np.int64))
    return np.sort(rng.permutation(found)[:wanted])
