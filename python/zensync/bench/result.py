"""Results of `zensync bench`: rows, the machine and commit they belong to, printing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Row = dict[str, Any]

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACE = "python/zensync"  # of the package in its source tree


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
    """The commit of the source tree that this zensync was built from, or '' where none is known.

    '+' behind it if something else than results, which a measurement itself writes, was changed,
    or if the tree's Python files are not those that run here.
    """
    try:
        tree = source_tree()
        if tree is None or Path(_git(tree, "rev-parse", "--show-toplevel")).resolve() != tree:
            return ""
        changed = _git(tree, "status", "--porcelain", "--", ":/", ":(top,exclude)bench/results")
        mark = "+" if changed or _differs(tree) else ""
        return _git(tree, "rev-parse", "--short", "HEAD") + mark
    except (OSError, subprocess.SubprocessError):
        return ""


def source_tree() -> Path | None:
    """Where the package lies in a checkout, else what pip was told to install (PEP 610)."""
    root = _PACKAGE.parents[1]
    if (root / "pyproject.toml").is_file() and root / _PLACE == _PACKAGE:
        return root
    try:
        origin = metadata.Distribution.from_name("zensync").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(origin)["url"]) if origin else None
    if url is None or url.scheme != "file":
        return None
    tree = Path(unquote(url.path)).resolve()
    return tree if (tree / _PLACE).is_dir() else None  # not so: a wheel, or a tree that has gone


def _differs(tree: Path) -> bool:
    """Whether the tree has gone on since this package was installed from it."""
    own, there = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.py")}
        for root in (_PACKAGE, tree / _PLACE)
    )
    return own != there


def _git(tree: Path, *words: str) -> str:
    command = ["git", "-C", str(tree), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
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
