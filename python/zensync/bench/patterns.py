"""Which units of a tensor are non-zero on each rank: the patterns of `zensync bench`.

A unit is here an element, or a row of a tensor that is sparse by rows. Every pattern is a function
of a `Case` and a rank alone: a run repeats exactly, and each rank can work out what all ranks hold.
`docs/bench.md` defines each in one line. What cannot be had (a disjoint pattern too dense, a
vocabulary too small) is a `PatternError`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int64]

_FRONT_DECAY = 6.0
_ZIPF_EXPONENT = 1.1
_CLUSTER_UNITS = 256
_STRIDE = 64


class PatternError(ValueError):
    """There is no such pattern, or none with this density on so many ranks."""


@dataclass(frozen=True)
class Case:
    """`density` of `units` units are non-zero on each of `ranks` ranks, placed by `pattern`."""

    pattern: str
    units: int
    density: float
    ranks: int
    seed: int = 0
    tokens_file: str = ""  # of `vocab`: int32 ids in a .npy file

    @property
    def wanted(self) -> int:
        """Units that a rank is to hold."""
        return min(self.units, max(1, round(self.units * self.density)))


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
    """The non-zero units of `rank`, ascending and distinct: int64."""
    if case.pattern not in _MAKERS:
        known = ", ".join(_MAKERS)
        raise PatternError(f"no pattern is called {case.pattern!r}; there are {known}")
    return _MAKERS[case.pattern](case, rank).astype(np.int64, copy=False)


def _rng(case: Case, *place: int) -> np.random.Generator:
    return np.random.default_rng([case.seed, *place])


def _uniform(case: Case, rank: int) -> Units:
    return np.flatnonzero(_rng(case, rank).random(case.units) < case.density)


@functools.lru_cache(maxsize=1)  # of all ranks of a case alike
def _front_odds(units: int, density: float) -> npt.NDArray[np.float32]:
    x = np.arange(units) / units
    return (front_scale(density) * np.exp(-_FRONT_DECAY * x)).astype(np.float32)


def _front(case: Case, rank: int) -> Units:
    odds = _front_odds(case.units, case.density)
    return np.flatnonzero(_rng(case, rank).random(case.units) < odds)


def _zipf(case: Case, rank: int) -> Units:
    # Gumbel noise on the logarithms of the weights: the largest sums are a weighted draw without
    # replacement, in one pass, at any density.
    weights = -_ZIPF_EXPONENT * np.log(np.arange(case.units) + 1.0)
    keys = weights + _rng(case, rank).gumbel(size=case.units)
    if case.wanted == case.units:
        return np.arange(case.units)
    return np.sort(np.argpartition(-keys, case.wanted)[: case.wanted])


def _clustered(case: Case, rank: int) -> Units:
    length = min(_CLUSTER_UNITS, case.wanted)
    runs = max(1, min(round(case.wanted / length), case.units // length))
    # Runs shrunk to one unit each, drawn apart, then stretched again: they may touch, not overlap.
    shrunk = case.units - runs * (length - 1)
    starts = np.sort(_rng(case, rank).choice(shrunk, size=runs, replace=False))
    starts = starts + np.arange(runs) * (length - 1)
    return (starts[:, None] + np.arange(length)).ravel()


def _strided(case: Case, rank: int) -> Units:
    stride = max(1, min(_STRIDE, math.floor(1 / case.density)))
    return np.arange(rank % stride, case.units, stride)[: case.wanted]


def _identical(case: Case, rank: int) -> Units:
    del rank
    return _uniform(case, 0)


def _disjoint(case: Case, rank: int) -> Units:
    if case.ranks * case.density > 1 + 1e-9:
        most = 1 / case.ranks
        raise PatternError(
            f"disjoint: {case.ranks} ranks of density {case.density:g} do not fit beside each "
            f"other; the density is at most {most:.4g}"
        )
    draws = _rng(case, 0).random(case.units)  # the same on all ranks, which share the range
    return np.flatnonzero((draws >= rank * case.density) & (draws < (rank + 1) * case.density))


def _onehot(case: Case, rank: int) -> Units:
    return _rng(case, rank).integers(case.units, size=1)


@functools.lru_cache(maxsize=1)
def _tokens_below(path: str, units: int) -> Units:
    tokens = np.load(path, mmap_mode="r")
    return np.asarray(tokens[tokens < units], dtype=np.int64)


def _vocab(case: Case, rank: int) -> Units:
    tokens = _tokens_below(case.tokens_file, case.units)
    start = (rank * tokens.size // case.ranks + case.seed) % max(tokens.size, 1)
    # Where each id comes first, reading round the text from the rank's own place.
    ids, first = np.unique(np.roll(tokens, -start), return_index=True)
    if ids.size < case.wanted:
        raise PatternError(
            f"vocab: the text has {ids.size} distinct tokens below {case.units} rows, not "
            f"{case.wanted}; the density is at most {ids.size / case.units:.4g}"
        )
    return np.sort(ids[np.argsort(first)[: case.wanted]])


_MAKERS: dict[str, Callable[[Case, int], Units]] = {
    "uniform": _uniform,
    "front": _front,
    "zipf": _zipf,
    "clustered": _clustered,
    "strided": _strided,
    "identical": _identical,
    "disjoint": _disjoint,
    "onehot": _onehot,
    "vocab": _vocab,
}
PATTERNS = tuple(_MAKERS)
SPREAD_PATTERNS = PATTERNS[:5]  # what the balance of owners is judged on
