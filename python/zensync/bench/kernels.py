"""`zensync bench --kernels`: local work on one core, each beside a memcpy in the same run."""

from __future__ import annotations

import math
import time
from statistics import median

import numpy as np

from .. import _core
from ..errors import raise_error
from ..lab.stats import paired_ratio
from .patterns import Case, Units, units_of
from .result import Row, Table

_TENSOR_BYTES = 128 << 20
_RANKS = 8
_ROWS, _ROW_ELEMS, _ROW_DENSITY = 100_000, 64, 0.01
_ENTRIES = 8192
_ITERATIONS = 11
_COALESCE_LEAST = 4.0


def run() -> list[Table]:
    """Times find + partition + encode, write back, finding rows, coalescing (against torch's)."""
    wrong = _core.kernels_error()
    if wrong is not None:
        raise_error(wrong)
    active = _core.info()["kernels_active"]
    return [Table(f"kernels {active}, one core", [*_elements(), _rows(), _coalesce()])]


def _row(
    what: str, pairs: list[tuple[float, float]], rival: str, least: float | None = None
) -> Row:
    """`ratio` is the rival's time over ours, with its 95 % interval; `least` or more is good."""
    ratio = paired_ratio([other for _, other in pairs], [ours for ours, _ in pairs])
    met = None if least is None or math.isnan(ratio.median) else ratio.median >= least
    return {
        "kernel": what,
        "ours_ms": median(ours for ours, _ in pairs) * 1e3,
        "rival": rival,
        "rival_ms": median(other for _, other in pairs) * 1e3,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "target": "–" if least is None else f"≥ {least:.3g}",
        "met": met,
    }


def _elements() -> list[Row]:
    units = _TENSOR_BYTES // 4
    rows = []
    for density, least in ((0.01, 1.0), (0.05, 0.5)):
        tensor = np.zeros(units, dtype=np.float32)
        tensor[units_of(Case("front", units, density, _RANKS), 0)] = 1.5
        name = f"find + partition + encode, 128 MB fp32, {density:.0%}"
        rows.append(_row(name, _core.time_encode(tensor, _RANKS, _ITERATIONS), "memcpy", least))
        name = f"decode + write back, 128 MB fp32, {density:.0%}"
        rows.append(_row(name, _core.time_write_back(tensor, _RANKS, _ITERATIONS), "memcpy"))
    return rows


def _rows() -> Row:
    tensor = np.zeros((_ROWS, _ROW_ELEMS), dtype=np.float32)
    tensor[units_of(Case("front", _ROWS, _ROW_DENSITY, _RANKS), 0)] = 1.5
    pairs = _core.time_find_rows(tensor, _ROW_ELEMS, 4 * _ITERATIONS)
    # In at most 0.7 of the time that copying the table takes.
    return _row("non-zero rows of 100 k x 64 fp32, 1 %", pairs, "memcpy", 1 / 0.7)


def _coalesce() -> Row:
    tokens: Units = np.random.default_rng(1).zipf(1.3, 4 * _ENTRIES).astype(np.int64)
    indices = np.ascontiguousarray(tokens[tokens < _ROWS][:_ENTRIES])
    values = np.ones((indices.size, _ROW_ELEMS), dtype=np.float32)
    what = f"coalesce {indices.size} rows of {_ROW_ELEMS} fp32 ({np.unique(indices).size} distinct)"
    try:
        import torch
    except ImportError:
        ours = [(_core.time_coalesce(indices, values), float("nan")) for _ in range(_ITERATIONS)]
        return _row(what, ours, "torch (not installed)", _COALESCE_LEAST)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    where = torch.from_numpy(indices)[None]
    shape = (_ROWS, _ROW_ELEMS)
    stored = torch.sparse_coo_tensor(where, torch.from_numpy(values), shape, check_invariants=False)
    pairs = []
    for _ in range(4 * _ITERATIONS):
        ours_s = _core.time_coalesce(indices, values)
        start = time.perf_counter()
        stored.coalesce()
        pairs.append((ours_s, time.perf_counter() - start))
    torch.set_num_threads(threads)
    return _row(what, pairs[2:], "torch coalesce", _COALESCE_LEAST)
