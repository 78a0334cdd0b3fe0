"""From what ranks measured to the rows of `zensync bench`: times, bytes, ideals, ratios. Pure.

The words are those of docs/glossary.md; docs/bench.md defines every field. Times are seconds here
and milliseconds in rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from ..lab.processes import host_of
from ..lab.stats import Ratio, paired_ratio
from .config import ITEM_BYTES, OUR_SCHEMES, Config
from .facts import Facts
from .patterns import Case

Row = dict[str, Any]

FRAME_SHARE = 1514 / 1448  # bytes of a full frame, over those of TCP's payload in it
LEAST_BURSTS = 4  # a synchronisation that moves less is mostly what a full bucket gives away
_INDEX_BYTES = 8  # torch's COO tensors carry int64 indices
_METADATA_BYTES = 9 * 8  # sizes and count of entries, which Gloo's sparse all-reduce gathers first


@dataclass
class Measured:
    """What one rank saw of one scheme in one case."""

    seconds: list[float]  # from the common start to the rank's own end, an iteration each
    wrong: int  # elements, over all iterations
    sent_bytes: int  # of one iteration: the card's, or our own count on loopback
    received_bytes: int
    dense_bytes: int  # of one iteration, handed to a dense all-reduce
    late_s: float = 0.0  # after the common start, at the worst of its starts


@dataclass
class CpuWindow:
    """What one rank saw of its machine during the iterations of one case."""

    machine: str
    elapsed_s: float
    busy_s: float  # of all processes
    own_s: float


@dataclass
class CaseResult:
    """One case, over all ranks: by scheme, by rank."""

    size: int
    case: Case
    facts: Facts
    by_scheme: dict[str, list[Measured]]
    foreign_load: float


def foreign_load(windows: Sequence[CpuWindow]) -> float:
    """Cores that others kept busy, on the machine where it was most."""
    loads = [0.0]
    for machine in {window.machine for window in windows}:
        here = [window for window in windows if window.machine == machine]
        elapsed = median(window.elapsed_s for window in here)
        busy = median(window.busy_s for window in here)
        if elapsed > 0:
            loads.append((busy - sum(window.own_s for window in here)) / elapsed)
    return max(loads)


def link_ms(payload_bytes: float, config: Config) -> float | None:
    """Milliseconds that a card takes for TCP's payload, frames included; None on loopback."""
    if config.rate_bits_per_s is None:
        return None
    return payload_bytes * FRAME_SHARE * 8e3 / config.rate_bits_per_s


def ring_bytes(payload_bytes: float, ranks: int) -> float:
    """What each rank of a ring all-reduce sends, and receives."""
    return 2 * (ranks - 1) / ranks * payload_bytes


def gather_bytes(blocks: Sequence[float]) -> list[float]:
    """The larger of sent and received bytes of each rank of a ring that gathers all `blocks`.

    In Gloo's ring a rank passes on all blocks but its right neighbour's, and is sent all but its
    own.
    """
    whole, ranks = sum(blocks), len(blocks)
    if ranks == 1:
        return [0.0]
    return [whole - min(blocks[rank], blocks[(rank + 1) % ranks]) for rank in range(ranks)]


def wire_bytes(scheme: str, result: CaseResult, config: Config) -> tuple[list[float], str]:
    """(bytes of each card, or of each rank on loopback; who counted them)."""
    measured = result.by_scheme[scheme]
    if config.interface:
        leaders = [
            measured[rank]
            for rank in range(config.ranks)
            if rank == 0 or _host(config, rank) != _host(config, rank - 1)
        ]
        return [float(max(one.sent_bytes, one.received_bytes)) for one in leaders], "interface"
    if scheme in OUR_SCHEMES:
        counted = [float(max(one.sent_bytes, one.received_bytes)) for one in measured]
        if not any(one.dense_bytes for one in measured):
            return counted, "count"
        dense = [ring_bytes(one.dense_bytes, config.ranks) for one in measured]
        return [sum(pair) for pair in zip(counted, dense, strict=True)], "computed"
    if scheme == "torch_sparse":
        entry = config.unit_bytes + _INDEX_BYTES
        blocks = [units * entry + _METADATA_BYTES for units in result.facts.units_by_rank]
        return gather_bytes(blocks), "computed"
    return [ring_bytes(result.size, config.ranks)] * config.ranks, "computed"


def _host(config: Config, rank: int) -> int:
    return host_of(rank, config.ranks, config.hosts)


def slowest(measured: Sequence[Measured]) -> list[float]:
    """Seconds of each iteration: those of its slowest rank."""
    return [max(each) for each in zip(*(one.seconds for one in measured), strict=True)]


def rows_of(result: CaseResult, config: Config) -> list[Row]:
    """One row per scheme, in the order that was asked for."""
    times = {name: slowest(measured) for name, measured in result.by_scheme.items()}
    moved = {name: wire_bytes(name, result, config) for name in result.by_scheme}
    least = LEAST_BURSTS * config.burst_bytes if config.rate_bits_per_s is not None else 0
    counts = {name: max(per_card) >= least for name, (per_card, _) in moved.items()}
    rows = []
    for name in result.by_scheme:
        row = _row(name, result, config, times[name])
        per_card, source = moved[name]
        row |= _bytes_fields(per_card, source, result, config)
        if not counts[name] or not row["bound_ms"]:
            row["efficiency"] = None
        else:
            row["efficiency"] = row["bound_ms"] / row["time_ms"]
        for rival in ("dense", "sparse"):
            other = f"torch_{rival}"
            can = other in times and counts[name] and counts[other]
            row |= _ratio_fields(rival, paired_ratio(times[other], times[name]) if can else None)
        row["late_ms"] = max(one.late_s for one in result.by_scheme[name]) * 1e3
        row["wrong"] = sum(one.wrong for one in result.by_scheme[name])
        row["foreign_load"] = result.foreign_load
        row["times_ms"] = [seconds * 1e3 for seconds in times[name]]
        rows.append(row)
    return rows


def _row(scheme: str, result: CaseResult, config: Config, seconds: Sequence[float]) -> Row:
    case, facts = result.case, result.facts
    return {
        "scheme": scheme,
        "ranks": config.ranks,
        "hosts": config.hosts,
        "bytes": result.size,
        "dtype": config.dtype,
        "row": config.row,
        "parts": config.parts,
        "pattern": case.pattern,
        "density": facts.density,
        "density_asked": None if case.pattern == "onehot" else case.density,
        "union_density": facts.union_density,
        "skewness": facts.skewness,
        "rate_bits_per_s": config.rate_bits_per_s,
        "iters": len(seconds),
        "time_ms": median(seconds) * 1e3,
        "time_ms_min": min(seconds) * 1e3,
    }


def _bytes_fields(
    per_card: Sequence[float], source: str, result: CaseResult, config: Config
) -> Row:
    unit_bytes = config.row * ITEM_BYTES[config.dtype]
    return {
        "wire_bytes_max": round(max(per_card)),
        "wire_bytes_mean": round(mean(per_card)),
        "wire_source": source,
        "link_ideal_ms": link_ms(max(per_card), config),
        "bound_ms": link_ms(result.facts.bound_units * unit_bytes, config),
    }


def _ratio_fields(rival: str, ratio: Ratio | None) -> Row:
    found = asdict(ratio) if ratio else {"median": None, "low": None, "high": None}
    return {
        f"vs_{rival}": found["median"],
        f"vs_{rival}_low": found["low"],
        f"vs_{rival}_high": found["high"],
    }
