"""`zensync bench --bytes`: wire bytes against the index-free ideal; balance of owners.

Ranks are threads over the counting loopback; every result is in the dict that the core returns.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import _core
from ..errors import raise_error
from .patterns import SPREAD_PATTERNS, Case, Units, units_of
from .result import Row, Table

_TENSOR_BYTES = 32 << 20
_ROW_ELEMS = 64
_TOKENS = 8192
_BALANCE_UNITS = 4_000_000
_BALANCE_DENSITY = 0.005


def run(data: str | None, offline: bool) -> list[Table]:
    """Element-sparse `front`, rows of real tokens, imbalance over owners."""
    return [
        Table("wire bytes, 32 MB fp32, front, 8 ranks", _front()),
        Table("wire bytes, rows of 64 fp32, 8192 real tokens a rank", _tokens(data, offline)),
        Table("imbalance: units an owner receives from all ranks, max/mean", _balance()),
    ]


def _measure(inputs: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The second of two equal steps: counts are known, as in training."""
    result = _core.loopback_sum(inputs, {"steps": 2, **options})
    if isinstance(result, _core.ErrorInfo):
        raise_error(result)
    for error in result["errors"]:
        if error is not None:
            raise_error(error)
    return dict(result)


def _volume_row(sets: list[Units], unit_bytes: int, result: dict[str, Any]) -> Row:
    ranks = len(sets)
    own = sum(s.size for s in sets) / ranks
    union = np.unique(np.concatenate(sets)).size
    ideal = (ranks - 1) / ranks * (own + union) * unit_bytes
    wire = [max(pair) for pair in zip(result["sent_bytes"], result["received_bytes"], strict=True)]
    return {
        "ranks": ranks,
        "own_units": round(own),
        "union_units": union,
        "wire_bytes_max": max(wire),
        "ideal_bytes": round(ideal),
        "ratio": max(wire) / ideal,
    }


def _front() -> list[Row]:
    rows = []
    units = _TENSOR_BYTES // 4
    for density, target in ((0.01, 1.18), (0.05, 1.10)):
        sets = [units_of(Case("front", units, density, 8), rank) for rank in range(8)]
        inputs = []
        for chosen in sets:
            tensor = np.zeros(units, dtype=np.float32)
            tensor[chosen] = 1.0
            inputs.append(tensor)
        for scheme in ("balanced", "auto"):
            result = _measure(inputs, {"scheme": scheme, "name": "front"})
            volume = _volume_row(sets, 4, result)
            met = volume["ratio"] <= target
            used = result["reports_by_step"][-1][0]["scheme"]
            rows.append({"density": density, "scheme": scheme, "used": used, **volume,
                         "target": f"≤ {target}", "met": met})  # fmt: skip
    return rows


def _tokens(data: str | None, offline: bool) -> list[Row]:
    from ..demo.data import data_folder, prepare

    corpus = prepare(
        data_folder(data), offline=offline, say=lambda text: print(text, file=sys.stderr)
    )
    tokens = corpus.load()
    rows = []
    for ranks in (4, 8):
        step = tokens.size // ranks
        sets = [
            np.unique(tokens[rank * step : rank * step + _TOKENS]).astype(np.int64)
            for rank in range(ranks)
        ]
        inputs = [(ids, np.ones((ids.size, _ROW_ELEMS), dtype=np.float32)) for ids in sets]
        options = {"scheme": "balanced", "name": "tokens", "rows": corpus.vocabulary}
        result = _measure(inputs, options)
        volume = _volume_row(sets, 4 * _ROW_ELEMS, result)
        width = result["reports_by_step"][-1][0]["width"]
        target, met = "≤ 1.06", volume["ratio"] <= 1.06
        if not corpus.is_real:  # other text has other counts: a figure, but no judgement
            target, met = "≤ 1.06 for real tokens only: these are a substitute", None
        rows.append({**volume, "parts": _ROW_ELEMS // width, "target": target, "met": met,
                     "text": corpus.source})  # fmt: skip
    return rows


def _balance() -> list[Row]:
    rows = []
    for ranks in (8, 16):
        for pattern in SPREAD_PATTERNS:
            case = Case(pattern, _BALANCE_UNITS, _BALANCE_DENSITY, ranks)
            sets = [units_of(case, rank) for rank in range(ranks)]
            units = np.concatenate(sets)
            row: Row = {"ranks": ranks, "pattern": pattern, "units_a_rank": units.size // ranks}
            for name, rotation in (("rotation", True), ("range", False)):
                counts = np.array(_core.owner_counts(units, case.units, ranks, "w", rotation))
                row[name] = float(counts.max() / counts.mean())
            rows.append({**row, "target": "≤ 1.05", "met": row["rotation"] <= 1.05})
    return rows
