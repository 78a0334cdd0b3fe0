"""What an observation recorded, turned into figures and verdicts. Pure, without torch.

The words are those of docs/glossary.md; docs/observe.md says what each figure is. What is sent is
the business of `_forecast.py`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from .bench.figures import FRAME_SHARE

KEPT = 4  # steps whose unit sets are kept, for the exchanges that are performed on them
_LEAST_SAVING = 0.05  # of the bytes now; less is not worth a change

Units = npt.NDArray[np.int64]
NONE, DENSE, COO = 0, 1, 2  # how a gradient was stored


@dataclass(frozen=True)
class Subject:
    """A parameter, as it was when the observation began. rows: elements where it is 1-D.

    item_bytes: of an element as it is sent. refusal: why zensync leaves it in the dense rest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: int
    row_elems: int
    item_bytes: int
    starts_sparse: bool = False  # it is a table
    is_tied: bool = False  # a table that another kind of layer uses too
    is_frozen: bool = False
    refusal: str = ""

    @property
    def row_bytes(self) -> int:
        return self.row_elems * self.item_bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def bitmap_bytes(self) -> int:
        return 0 if self.is_frozen else -(-self.rows // 8)


@dataclass
class Step:
    """One parameter in one backward: by rank. elements: non-zero ones, if dense-stored."""

    sets: list[Units]
    layouts: list[int]
    elements: list[int]


@dataclass
class Record:
    """Sums over steps, and the last few steps."""

    subject: Subject
    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    density_max: float = 0.0
    element_density_max: float = 0.0
    layout: int = NONE
    kept: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """One more step."""
        rows = max(self.subject.rows, 1)
        elems = max(rows * self.subject.row_elems, 1)
        shares = [units.size / rows for units in step.sets]
        union = np.unique(np.concatenate(step.sets)).size / rows
        skews = [skewness(u, rows, len(step.sets)) for u in step.sets if u.size]
        self.steps += 1
        self._sum("density", mean(shares))
        self._sum("densest", max(shares))
        self._sum("union_density", union)
        self._sum("element_density", mean(step.elements) / elems)
        self._sum("densest_elements", max(step.elements) / elems)
        if skews:
            self._sum("active", 1.0)
            self._sum("skewness", mean(skews))
            self._sum("densification", union / mean(shares))
        self.density_max = max(self.density_max, *shares)
        self.element_density_max = max(self.element_density_max, max(step.elements) / elems)
        self.layout = max(self.layout, *step.layouts)
        self.kept = [*self.kept[1 - KEPT :], step]

    def _sum(self, what: str, value: float) -> None:
        self.sums[what] = self.sums.get(what, 0.0) + value

    def average(self, what: str, over: str = "") -> float:
        """Mean of a figure over all steps, or over those that `over` counts."""
        count = self.sums.get(over, 0.0) if over else self.steps
        return self.sums.get(what, 0.0) / count if count else 0.0


def skewness(units: Units, rows: int, ranks: int) -> float:
    """Density of the densest of `ranks` equal ranges, over the density of the whole."""
    ranges = min(ranks, rows)
    bounds = np.arange(ranges + 1) * rows // ranges
    counts = np.diff(np.searchsorted(units, bounds))
    return float((counts / np.diff(bounds)).max()) / (units.size / rows)


class Diary:
    """What one rank saw: for each step the layout, elements and bitmap of each parameter."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._count = len(subjects)
        self._ends = np.cumsum([0, *(subject.bitmap_bytes for subject in subjects)])
        self.layouts: list[npt.NDArray[np.uint8]] = []
        self.elements: list[npt.NDArray[np.int64]] = []
        self.bits: list[npt.NDArray[np.uint8]] = []

    def write(self, seen: dict[int, tuple[int, int, npt.NDArray[np.uint8]]]) -> None:
        """One step: (layout, elements, bitmap) of each parameter that had a gradient, by place."""
        layouts = np.zeros(self._count, np.uint8)
        elements = np.zeros(self._count, np.int64)
        bits = np.zeros(self._ends[-1], np.uint8)
        for place, (layout, count, bitmap) in seen.items():
            layouts[place], elements[place] = layout, count
            bits[self._ends[place] : self._ends[place + 1]] = bitmap
        self.layouts.append(layouts)
        self.elements.append(elements)
        self.bits.append(bits)

    def part(self, step: int, place: int) -> tuple[Units, int, int]:
        """(units, layout, elements) of a parameter in a step."""
        bits = self.bits[step][self._ends[place] : self._ends[place + 1]]
        units = np.flatnonzero(np.unpackbits(bits)).astype(np.int64)
        return units, int(self.layouts[step][place]), int(self.elements[step][place])

    def pack(self) -> bytes:
        """As bytes for other ranks, compressed."""
        stream = io.BytesIO()
        steps = len(self.layouts)
        np.savez_compressed(
            stream,
            layouts=np.array(self.layouts, np.uint8).reshape(steps, self._count),
            elements=np.array(self.elements, np.int64).reshape(steps, self._count),
            bits=np.array(self.bits, np.uint8).reshape(steps, int(self._ends[-1])),
        )
        return stream.getvalue()

    def unpack(self, packed: bytes) -> Diary:
        """Another rank's, of the same subjects. ValueError if it is not one."""
        other = Diary([])
        other._count, other._ends = self._count, self._ends
        try:
            with np.load(io.BytesIO(packed), allow_pickle=False) as file:
                layouts, elements, bits = (file[it] for it in ("layouts", "elements", "bits"))
        except (OSError, KeyError, zipfile.BadZipFile, EOFError, ValueError) as why:
            raise ValueError(f"a rank's diary cannot be read ({type(why).__name__})") from why
        shape = (len(layouts), self._count)
        fits = layouts.shape == elements.shape == shape
        if not fits or bits.shape != (len(layouts), self._ends[-1]) or layouts.max(initial=0) > COO:
            raise ValueError("a rank's diary is of other parameters")
        other.layouts, other.elements, other.bits = list(layouts), list(elements), list(bits)
        return other


def records_of(subjects: Sequence[Subject], diaries: Sequence[Diary]) -> list[Record]:
    """The steps that all ranks wrote down."""
    records = [Record(subject) for subject in subjects]
    for step in range(min(len(diary.layouts) for diary in diaries)):
        for place, record in enumerate(records):
            parts = [diary.part(step, place) for diary in diaries]
            sets, layouts, elements = (list(column) for column in zip(*parts, strict=True))
            record.add(Step(sets, layouts, elements))
    return records


def verdict(record: Record, way: str, now: float, after: float) -> str:
    """What to do with one parameter, in words. way: how zensync would send it."""
    subject, is_coo = record.subject, record.layout == COO
    if subject.is_frozen:
        return "leave it: frozen"
    if len(record.kept[-1].sets) == 1:
        return "leave it: one rank"
    if record.layout == NONE:
        return "leave it: no gradient"
    is_adapter = "lora" in subject.name.lower()
    if way == "dense" and not is_coo:
        if subject.is_tied:
            return "leave it: tied to a dense output layer"
        words = subject.refusal or "dense"
        return f"leave it: {words} (a low-rank adapter)" if is_adapter else f"leave it: {words}"
    if now - after <= _LEAST_SAVING * now:
        return "leave it: dense in COO form" if way == "dense" else "leave it: nothing is saved"
    return "use zensync"


def totals(
    rows: Sequence[dict[str, Any]], moved: tuple[float, float], rate: float | None
) -> dict[str, Any]:
    """Bytes (now, with zensync) and milliseconds of a step, all parameters together."""
    now, after = moved
    now_ms, after_ms = (link_ms(it, rate) for it in moved)
    saved = None if now_ms is None or after_ms is None else now_ms - after_ms
    names = ", ".join(row["name"] for row in rows if row["verdict"] == "use zensync")
    is_worth = bool(names) and now - after > _LEAST_SAVING * now
    if is_worth:
        words = f"use zensync: for {names}"
    else:
        words = "leave it: little is saved in all" if names else "leave it: nothing is saved"
    return {
        "now_bytes": now, "zensync_bytes": after, "now_ms": now_ms, "zensync_ms": after_ms,
        "saved_ms": saved, "verdict": words,
    }  # fmt: skip


def link_ms(payload_bytes: float, rate: float | None) -> float | None:
    """Milliseconds that a card of `rate` bits per second takes, frames included."""
    return None if rate is None else payload_bytes * FRAME_SHARE * 8e3 / rate
