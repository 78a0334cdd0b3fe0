"""Paired ratios with bootstrap intervals: the one way in which speeds are compared here.

Pure. The generator of the bootstrap has a fixed seed, so that equal figures give equal intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Ratio:
    """The median of `values` (at least one) and where 95 % of its resampled medians lie."""
    every = numpy.asarray(values, dtype=float)
    rng = numpy.random.default_rng(0)
    medians = numpy.median(rng.choice(every, (_RESAMPLES, every.size)), axis=1)
    low, high = numpy.percentile(medians, [2.5, 97.5])
    return Ratio(float(numpy.median(every)), float(low), float(high))


def paired_ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """How many times longer `slow` took than `fast`, iteration against iteration."""
    return median_interval(list(numpy.asarray(slow, float) / numpy.asarray(fast, float)))
