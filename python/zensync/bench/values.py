"""Values whose sums are exact in every dtype, in any order. Pure, without torch.

They are small integers: every partial sum fits bfloat16 (up to 256) and float16 (up to 2048). They
follow from element, rank and seed, so that each rank works out what all ranks hold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .patterns import Case, Units

Values = npt.NDArray[np.int16]

_EXACT_SUM = 256  # bfloat16 has 8 bits of precision
_LARGEST_VALUE = 7
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MAX_RANKS = _EXACT_SUM


def largest_value(ranks: int) -> int:
    """Values lie in ±1…±this, so that no sum of all ranks leaves ±256."""
    if ranks > _MAX_RANKS:
        raise ValueError(f"at most {_MAX_RANKS} ranks have sums that are exact in every dtype")
    return min(_LARGEST_VALUE, _EXACT_SUM // ranks)


def values_of(units: Units, row: int, rank: int, case: Case) -> Values:
    """[units, row] non-zero integers of a rank."""
    at = (units[:, None] * row + np.arange(row)).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = at * _MIX[0] + np.uint64(rank + 1) * _MIX[1] + np.uint64(case.seed) * _MIX[2]
        mixed = (mixed ^ (mixed >> np.uint64(31))) * _MIX[1]
        mixed ^= mixed >> np.uint64(29)
    size = (mixed >> np.uint64(8)) % np.uint64(largest_value(case.ranks)) + np.uint64(1)
    negative = (mixed & np.uint64(1)).astype(np.int16)
    return size.astype(np.int16) * (1 - 2 * negative)
