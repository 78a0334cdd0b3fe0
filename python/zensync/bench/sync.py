"""Shows the rows of synchronisations: a table for people, JSON for programs, and warnings."""

from __future__ import annotations

import sys
from typing import Any

from ..lab.load import VOID_ABOVE
from .config import Config
from .options import Place
from .result import Table, show, write_json

Row = dict[str, Any]


def report(rows: list[Row], config: Config, place: Place, json_file: str | None) -> None:
    """Table and warnings; JSON to `json_file` (in place of the table if it is stdout)."""
    load = max((row["foreign_load"] for row in rows), default=0.0)
    void = load > VOID_ABOVE
    where = f"{place.rate} a host" if place.rate else "loopback, where memory is the network"
    if json_file != "-":
        print(
            f"{config.ranks} ranks on {config.hosts} hosts, {where}; {config.dtype}, rows of "
            f"{config.row}; median of {config.iters}; foreign load {load:.2f} cores"
        )
        show(_tables(rows, config))
    if json_file:
        facts = {"network": place.rate or "loopback", "foreign_load": load, "void": void}
        write_json(json_file, [Table("", rows)], facts)
    if void:
        print(
            f"zensync bench: VOID: other programs kept {load:.2f} cores busy (> {VOID_ABOVE}): "
            "these times and ratios do not count",
            file=sys.stderr,
        )
    for row in rows:
        if row["wrong"]:
            what = f"{row['scheme']}, {row['pattern']}: {row['wrong']} wrong elements"
            print(f"zensync bench: {what}", file=sys.stderr)


def _tables(rows: list[Row], config: Config) -> list[Table]:
    """One table per case."""
    tables: list[Table] = []
    for row in rows:
        title = (
            f"{row['bytes'] / (1 << 20):.4g} MiB, {row['pattern']}: density {row['density']:.3g}, "
            f"union {row['union_density']:.3g}, skewness {row['skewness']:.3g}"
        )
        if row["scheme"] == config.schemes[0]:
            tables.append(Table(title))
        tables[-1].rows.append(_shown(row, config))
    return tables


def _shown(row: Row, config: Config) -> Row:
    ideal = row["link_ideal_ms"]
    shown: Row = {
        "scheme": row["scheme"],
        "ms": row["time_ms"],
        "wire MB": row["wire_bytes_max"] / 1e6,
        "by": row["wire_source"],
    }
    if config.rate_bits_per_s is not None:
        shown["/ideal"] = row["time_ms"] / ideal if ideal else None
        shown["efficiency"] = row["efficiency"]
    for rival in ("dense", "sparse"):
        if f"torch_{rival}" in config.schemes:
            shown[f"vs {rival}"] = _ratio(row, rival)
    shown["wrong"] = row["wrong"]
    return shown


def _ratio(row: Row, rival: str) -> str | None:
    if row[f"vs_{rival}"] is None:
        return None
    low, high = row[f"vs_{rival}_low"], row[f"vs_{rival}_high"]
    return f"{row[f'vs_{rival}']:.3g} ({low:.3g}–{high:.3g})"
