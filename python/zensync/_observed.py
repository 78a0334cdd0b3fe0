"""What an observation recorded, turned into figures, bytes and verdicts. Pure, without torch.

The words are those of docs/glossary.md; docs/observe.md says what each figure is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from .bench.figures import FRAME_SHARE, gather_bytes, ring_bytes

DENSE_ABOVE = 0.15  # largest density over ranks, above which tensors are summed dense
_LEAST_SAVING = 0.05  # of the bytes now; less is not worth a change
_INDEX_BYTES = 8  # torch's COO tensors carry int64 indices
_METADATA_BYTES = 9 * 8  # which Gloo's sparse all-reduce gathers first
_REPLAY_BYTES = 512 << 20  # of all ranks' values; a larger sum is estimated
_ESTIMATE = 1.06  # over the index-free ideal
_KEPT = 4  # steps whose unit sets are kept

Units = npt.NDArray[np.int64]
NONE, DENSE, COO = 0, 1, 2  # how a gradient was stored


@dataclass(frozen=True)
class Subject:
    """A parameter, as it was when the observation began. rows: elements where it is 1-D."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: int
    row_bytes: int
    is_tied: bool = False  # a table that another kind of layer uses too
    refusal: str = ""  # why zensync leaves it in the dense rest; empty: it does not

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass
class Step:
    """One parameter in one backward, over all ranks."""

    sets: list[Units]
    layouts: list[int]


@dataclass
class Record:
    """Sums over steps, and the unit sets of the last few."""

    subject: Subject
    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    density_max: float = 0.0
    layout: int = NONE
    kept: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """One more step."""
        rows = max(self.subject.rows, 1)
        shares = [units.size / rows for units in step.sets]
        union = np.unique(np.concatenate(step.sets)).size / rows
        skews = [skewness(u, rows, len(step.sets)) for u in step.sets if u.size]
        self.steps += 1
        self._sum("density", mean(shares))
        self._sum("union_density", union)
        if skews:
            self._sum("active", 1.0)
            self._sum("skewness", mean(skews))
            self._sum("densification", union / mean(shares))
        self._sum("now_bytes", max(self._now(step)))
        self.density_max = max(self.density_max, *shares)
        self.layout = max(self.layout, *step.layouts)
        self.kept = [*self.kept[1 - _KEPT :], step]

    def _sum(self, what: str, value: float) -> None:
        self.sums[what] = self.sums.get(what, 0.0) + value

    def average(self, what: str, over: str = "") -> float:
        """Mean of a figure over all steps, or over those that `over` counts."""
        count = self.sums.get(over, 0.0) if over else self.steps
        return self.sums.get(what, 0.0) / count if count else 0.0

    def _now(self, step: Step) -> list[float]:
        """What each rank sends, or receives, today."""
        ranks = len(step.sets)
        if COO not in step.layouts:
            return [ring_bytes(self.subject.bytes, ranks)]
        if ranks == 1:
            return [0.0]
        counts = [units.size for units in step.sets]  # Gloo coalesces first
        entry = self.subject.row_bytes + _INDEX_BYTES
        return gather_bytes([count * entry + _METADATA_BYTES for count in counts])


def skewness(units: Units, rows: int, ranks: int) -> float:
    """Density of the densest of `ranks` equal ranges, over the density of the whole."""
    ranges = min(ranks, rows)
    bounds = np.arange(ranges + 1) * rows // ranges
    counts = np.diff(np.searchsorted(units, bounds))
    return float((counts / np.diff(bounds)).max()) / (units.size / rows)


def forecast(record: Record) -> tuple[str, float, float]:
    """(scheme that `auto` takes, bytes of its exchanges, bytes of the dense all-reduce).

    Each for the busiest rank, a step. Exchanges are performed on the unit sets that were kept, in
    this process, and counted.
    """
    subject = record.subject
    if record.layout == NONE and not subject.refusal:
        return "none", 0.0, 0.0
    ranks = len(record.kept[-1].sets)
    ring = ring_bytes(subject.bytes, ranks)
    is_coo = record.layout == COO
    if ranks == 1:
        return "none", 0.0, 0.0
    if (subject.refusal and not is_coo) or record.density_max > DENSE_ABOVE:
        return "dense", 0.0, ring + (ring_bytes(subject.rows, ranks) if is_coo else 0.0)
    found = [_replay(subject, step.sets) for step in record.kept]
    return found[-1][0], mean(wire for _, wire in found), 0.0


def _replay(subject: Subject, sets: Sequence[Units]) -> tuple[str, float]:
    """(scheme, wire bytes of the busiest rank) of one sum, the counts being known."""
    own = sum(units.size for units in sets)
    row_elems = max(subject.row_bytes // _ITEM[subject.dtype], 1)
    if own * subject.row_bytes > _REPLAY_BYTES:
        ranks, union = len(sets), np.unique(np.concatenate(sets)).size
        ideal = (ranks - 1) / ranks * (own / ranks + union) * subject.row_bytes
        return "balanced", ideal * _ESTIMATE
    dtype = _NUMPY[subject.dtype]
    inputs: list[Any] = [(units, np.ones((units.size, row_elems), dtype)) for units in sets]
    options: dict[str, Any] = {"scheme": "auto", "steps": 2, "name": subject.name}
    options["rows"] = subject.rows
    if subject.dtype == "bfloat16":
        options["dtype"] = "bfloat16"
    result = _core.loopback_sum(inputs, options)
    if isinstance(result, _core.ErrorInfo):
        raise RuntimeError(result.message)
    sent = max(map(max, zip(result["sent_bytes"], result["received_bytes"], strict=True)))
    return str(result["reports_by_step"][-1][0]["scheme"]), float(sent)


_ITEM = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_NUMPY = {"float32": "f4", "float64": "f8", "bfloat16": "u2", "float16": "f2"}


def card_share(hosts: Sequence[object], ranks: int) -> float:
    """What the busiest card carries of zensync's exchanges, over what one rank does."""
    if ranks < 2:
        return 0.0
    return max(hosts.count(host) * (ranks - hosts.count(host)) / (ranks - 1) for host in hosts)


def row_of(record: Record, ranks: int, share: float) -> dict[str, Any]:
    """The figures of one parameter."""
    scheme, exchanged, ring = forecast(record)
    now = record.average("now_bytes") * (share if record.layout == COO else min(share, 1.0))
    after = exchanged * share + ring * min(share, 1.0)
    subject = record.subject
    return {
        "name": subject.name,
        "shape": list(subject.shape),
        "dtype": subject.dtype,
        "layout": ("none", "dense", "coo")[record.layout],
        "density": record.average("density"),
        "union_density": record.average("union_density"),
        "densification": record.average("densification", "active") or None,
        "skewness": record.average("skewness", "active") or None,
        "scheme": scheme,
        "now_bytes": now,
        "zensync_bytes": after,
        "exchange_bytes": exchanged,
        "verdict": verdict(record, ranks, now, after),
    }


def verdict(record: Record, ranks: int, now: float, after: float) -> str:
    """What to do with one parameter, in words."""
    subject, is_coo = record.subject, record.layout == COO
    if ranks == 1:
        return "leave it: one rank"
    if record.layout == NONE:
        return "leave it: no gradient"
    if subject.refusal and not is_coo:
        return f"leave it: {subject.refusal}"
    if record.density_max > DENSE_ABOVE and not is_coo:
        return "leave it: tied to a dense output layer" if subject.is_tied else "leave it: dense"
    if now - after <= _LEAST_SAVING * now:
        return "leave it: nothing is saved"
    return "use zensync"


def totals(rows: Sequence[dict[str, Any]], rate: float | None) -> dict[str, Any]:
    """Bytes and milliseconds of a step; zensync's where only what is worth it is changed."""
    now = sum(row["now_bytes"] for row in rows)
    used = [row for row in rows if row["verdict"] == "use zensync"]
    after = now - sum(row["now_bytes"] - row["zensync_bytes"] for row in used)
    now_ms, after_ms = (link_ms(it, rate) for it in (now, after))
    saved = None if now_ms is None or after_ms is None else now_ms - after_ms
    names = ", ".join(row["name"] for row in used)
    words = f"use zensync: for {names}" if used else "leave it: nothing would be saved"
    return {
        "now_bytes": now, "zensync_bytes": after, "now_ms": now_ms, "zensync_ms": after_ms,
        "saved_ms": saved, "verdict": words,
    }  # fmt: skip


def link_ms(payload_bytes: float, rate: float | None) -> float | None:
    """Milliseconds that a card of `rate` bits per second takes, frames included."""
    return None if rate is None else payload_bytes * FRAME_SHARE * 8e3 / rate
