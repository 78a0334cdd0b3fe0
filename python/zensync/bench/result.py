"""Results of `zensync bench`: rows, the machine and commit they belong to, printing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Table:
    """One table: rows with equal keys. `met` of a row is None where nothing is to be judged."""

    title: str
    rows: list[Row] = field(default_factory=list)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else ""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "load": load,
    }


def commit() -> str:
    """The commit of the working tree around the current folder, or ''.

    '+' behind it if something else than results, which a measurement itself writes, was changed.
    """
    try:
        changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)bench/results")
        return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], check=True, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()


def show(tables: Sequence[Table]) -> None:
    """Prints tables for people on stdout."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    for table in tables:
        if not table.rows:
            continue
        shown = RichTable(title=table.title, title_justify="left")
        for key in table.rows[0]:
            shown.add_column(key, justify="right")
        for row in table.rows:
            shown.add_row(*(_text(value) for value in row.values()))
        console.print(shown)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(path: str, tables: Sequence[Table], facts: dict[str, Any] | None = None) -> None:
    """Writes {"machine", "commit", …facts, "rows"}; rows of a table with a title name it.

    `-` is stdout.
    """
    rows = [
        {**({"table": table.title} if table.title else {}), **row}
        for table in tables
        for row in table.rows
    ]
    whole = {"machine": machine(), "commit": commit(), **(facts or {}), "rows": rows}
    text = json.dumps(whole, indent=1)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")
