"""What an observation found, as text for people."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 132
FROZEN = "leave it: frozen"


def make_table(report: dict[str, Any]) -> Table:
    """A line for each trained parameter, then the whole step."""
    title = f"zensync observe: {report['steps']} steps, {report['ranks']} ranks"
    table = Table(title=title, caption=_caption(report))
    table.add_column("parameter", overflow="fold")
    for head in ("density", "union", "skew", "now MB", "zensync MB", "saved ms"):
        table.add_column(head, justify="right")
    table.add_column("scheme")
    table.add_column("verdict")
    for row in report["parameters"]:
        if row["verdict"] == FROZEN:
            continue
        skew = "" if row["skewness"] is None else f"{row['skewness']:.1f}"
        is_used = row["verdict"] == "use zensync" and row["now_ms"] is not None
        saved = f"{row['now_ms'] - row['zensync_ms']:.2f}" if is_used else ""
        table.add_row(
            row["name"], f"{row['density']:.2%}", f"{row['union_density']:.2%}", skew,
            f"{row['now_bytes'] / 1e6:.3f}", f"{row['zensync_bytes'] / 1e6:.3f}", saved,
            row["scheme"], row["verdict"],
        )  # fmt: skip
    if report["parameters"]:
        table.add_section()
        now, after = (f"{report[key] / 1e6:.3f}" for key in ("now_bytes", "zensync_bytes"))
        table.add_row("all, with job headers", "", "", "", now, after, "", "", "")
    return table


def _caption(report: dict[str, Any]) -> str:
    lines = [report["verdict"]]
    frozen = sum(row["verdict"] == FROZEN for row in report["parameters"])
    if frozen:
        lines.append(f"not shown: {frozen} frozen parameters")
    if report["saved_ms"] is not None:
        rate = report["rate_bits_per_s"] / 1e6
        lines.append(
            f"{report['saved_ms']:.2f} ms saved of {report['now_ms']:.2f} ms a step, "
            f"on links of {rate:.4g} Mbit/s"
        )
    if report["error"]:
        lines.append(f"trouble: {report['error']}")
    return "\n".join(lines)


def as_text(report: dict[str, Any]) -> str:
    """The table as plain text."""
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH).print(make_table(report), markup=False)
    return stream.getvalue().rstrip()
