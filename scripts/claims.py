#!/usr/bin/env python3
"""Measures again every figure that README.md and other documents state: `make claims`.

The claims are data, in bench/claims.toml. Each measurement runs once (again, if other programs kept
the machine busy meanwhile), its claims are judged by their medians, and a table says claim, figure
with its 95 % interval, target. Exit status: 0; 1 if a claim falls short or could not be measured; 2
for names that are not there; 130 if interrupted. --json keeps the figures with machine and commit,
and beside them what each measurement printed. Runs in the environment that has zensync installed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zensync.bench.result import commit, machine
from zensync.demo.config import WARM_UP_STEPS
from zensync.lab.load import VOID_ABOVE, busy_s, own_s
from zensync.lab.processes import leaving_on_signals
from zensync.lab.stats import Ratio, median_interval, paired_ratio

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = ROOT / "bench/claims.toml"
TRIES = 3
STOP_S = 20.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A command whose JSON has figures."""

    name: str
    command: list[str]
    result: str = ""
    needs: str = ""
    timed: bool = True


@dataclass(frozen=True)
class Claim:
    """One figure and its target; the fields are those of bench/claims.toml."""

    name: str
    measurement: str
    key: str
    source: str = "README.md"
    says: str = ""
    where: dict[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None
    readme: str = ""
    better: str = "none"
    within: float = 0.0
    scale: float = 1.0
    inverse: bool = False

    def bounds(self) -> tuple[float, float]:
        """What the figure must lie between."""
        if self.readme:
            stated = float(re.findall(r"[\d.]+", self.readme)[0])
            low, high = stated * (1 - self.within), stated * (1 + self.within)
            return (
                -math.inf if self.better == "lower" else low,
                math.inf if self.better == "higher" else high,
            )
        low = -math.inf if self.at_least is None else self.at_least
        return low, math.inf if self.at_most is None else self.at_most

    def target(self) -> str:
        """The bounds for people."""
        low, high = self.bounds()
        if math.isinf(high):
            return f"≥ {low:.4g}"
        return f"≤ {high:.4g}" if math.isinf(low) else f"{low:.4g} to {high:.4g}"

    def figure(self, rows: Sequence[Row]) -> Ratio | None:
        """The worst of the rows that are meant; None if there is none with a figure."""
        found = [
            self._in_unit(row)
            for row in rows
            if row.get(self.key) is not None
            and all(row.get(name) == value for name, value in self.where.items())
        ]
        low, high = self.bounds()
        middle = (max(low, -1e300) + min(high, 1e300)) / 2 if low > -math.inf < high else 0.0
        if math.isinf(high):
            return min(found, key=lambda one: one.median, default=None)
        if math.isinf(low):
            return max(found, key=lambda one: one.median, default=None)
        return max(found, key=lambda one: abs(one.median - middle), default=None)

    def _in_unit(self, row: Row) -> Ratio:
        values = [row[self.key], row.get(f"{self.key}_low"), row.get(f"{self.key}_high")]
        own = float(values[0])
        median, low, high = (self.scale * float(own if one is None else one) for one in values)
        if self.inverse:
            median, low, high = 1 / median, 1 / high, 1 / low
        return Ratio(median, low, high)


def load_claims(path: Path = CLAIMS) -> tuple[dict[str, Measurement], list[Claim]]:
    """What the file of claims says."""
    whole = tomllib.loads(path.read_text(encoding="utf-8"))
    measurements = {name: Measurement(name, **one) for name, one in whole["measurement"].items()}
    return measurements, [Claim(**one) for one in whole["claim"]]


def not_in(readme: str, claims: Sequence[Claim]) -> list[Claim]:
    """Claims whose figure README.md does not have (any more)."""
    return [claim for claim in claims if claim.readme and claim.readme not in readme]


def rows_of(found: Any) -> list[Row]:
    """The rows of a measurement's JSON; of the demo's, one per mode, ratios worked out."""
    if isinstance(found, dict):
        return list(found["rows"])
    runs = {run["mode"]: run for run in found}
    ours = runs["zensync"]
    return [run | _demo_figures(run, ours, runs["dense"]) for run in runs.values()]


def _demo_figures(run: Row, ours: Row, dense: Row) -> Row:
    times, own_times = (one["step_s"][WARM_UP_STEPS:] for one in (run, ours))
    ratio = paired_ratio(times, own_times)
    pace = median_interval([1 / seconds for seconds in times])
    return {
        "time_ratio": ratio.median,
        "time_ratio_low": ratio.low,
        "time_ratio_high": ratio.high,
        "steps_per_s_low": pace.low,
        "steps_per_s_high": pace.high,
        "table_share": ours["wire_bytes_tables"] / run["wire_bytes_tables"],
        "loss_off": abs(run["loss"] / dense["loss"] - 1),
    }


class MeasureError(RuntimeError):
    """There is no figure, and why."""


@dataclass(frozen=True)
class Outcome:
    """What a measurement gave. A note says why its figures do not count, if they don't."""

    rows: list[Row]
    note: str = ""


def measure(what: Measurement, keep: Path | None) -> Outcome:
    """Runs a measurement, again while the machine is busy with others. MeasureError if it fails."""
    load, rows = 0.0, []
    for attempt in range(TRIES if what.timed else 1):
        say(f"{what.name}: {' '.join(what.command)}" + (" (again)" if attempt else ""))
        with tempfile.TemporaryDirectory(prefix="zensync-claims-") as folder:
            path = Path(folder) / "result.json"
            wall_s, load = _run([word.replace("{json}", str(path)) for word in what.command])
            wall: Row = {"wall_s": wall_s}
            if "{json}" not in what.command:
                return Outcome([wall])
            if not path.exists():
                raise MeasureError("the command wrote no result")
            text = path.read_text()
        found = json.loads(text)
        load = max([load, *_own_loads(found)])
        if what.needs and what.needs not in text:
            raise MeasureError(f"its input is not {what.needs!r}")
        rows = [*rows_of(found), wall]
        if keep is not None and what.result:
            _keep(keep / what.result, found)
        if not what.timed or load <= VOID_ABOVE:
            return Outcome(rows)
        say(f"{what.name}: void, other programs kept {load:.2f} cores busy")
    return Outcome(rows, f"void {TRIES} times: other programs kept {load:.2f} cores busy")


def _own_loads(found: Any) -> list[float]:
    """Foreign loads that a measurement has seen itself, in the part that it timed."""
    rows = found if isinstance(found, list) else found["rows"]
    return [row["foreign_load"] for row in rows if "foreign_load" in row]


def _run(command: list[str]) -> tuple[float, float]:
    """Seconds that a command took, and the foreign load meanwhile. MeasureError if it cannot run.

    Its output goes to stderr: stdout is for the table.
    """
    began, busy = time.monotonic(), _others_s()
    try:
        child = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    except OSError as why:
        raise MeasureError(f"the command could not be started: {why}") from why
    try:
        status = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(STOP_S)
    wall_s = time.monotonic() - began
    # 1 is a verdict of the command's own; here the figures are judged.
    if status not in (0, 1) or (status and "--json" not in command):
        raise MeasureError(f"the command ended with status {status}")
    return wall_s, max(0.0, (_others_s() - busy) / wall_s)


def _others_s() -> float:
    """CPU seconds so far of everything but this process and what it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy_s() - own_s() - children.ru_utime - children.ru_stime


def _keep(path: Path, found: Any) -> None:
    whole = {"machine": machine(), "commit": commit(), "runs": found}
    path.write_text(json.dumps(found if isinstance(found, dict) else whole, indent=1) + "\n")


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(f"claims: {text}", file=sys.stderr, flush=True)


def judge(claim: Claim, outcome: Outcome) -> Row:
    """One line of the table: what is claimed, the figure, and whether it is reached."""
    found = claim.figure(outcome.rows)
    low, high = claim.bounds()
    missing = "" if found else "no such figure in the result"
    return {
        "claim": claim.name,
        "says": claim.says or f"README: {claim.readme} ({claim.key})",
        "figure": found.median if found else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
        "target": claim.target(),
        "source": claim.source,
        "reached": bool(found and not outcome.note and low <= found.median <= high),
        "note": outcome.note or missing,
    }


def run(
    chosen: Sequence[Claim], measurements: dict[str, Measurement], keep: Path | None
) -> list[Row]:
    """The verdicts on the chosen claims, measurement by measurement."""
    verdicts = []
    for name in dict.fromkeys(claim.measurement for claim in chosen):
        try:
            outcome = measure(measurements[name], keep)
        except MeasureError as why:
            outcome = Outcome([], f"not measured: {why}")
            say(f"{name}: {outcome.note}")
        verdicts += [judge(claim, outcome) for claim in chosen if claim.measurement == name]
    return verdicts


def show(verdicts: Sequence[Row]) -> None:
    """The table, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table("claim", "what", "figure (95 %)", "target", "source", "")
    for row in verdicts:
        figure = "–"
        if row["figure"] is not None:
            figure = f"{row['figure']:.4g}"
            if row["low"] != row["high"]:
                figure += f" ({row['low']:.4g}–{row['high']:.4g})"
        mark = "reached" if row["reached"] else row["note"] or "SHORT"
        table.add_row(row["claim"], row["says"], figure, row["target"], row["source"], mark)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="claims or measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures, machine and commit")
    parser.add_argument("--list", action="store_true", help="show the claims; measure nothing")
    return parser.parse_args()


def main() -> int:
    """The command; returns the exit status."""
    options = _arguments()
    measurements, claims = load_claims()
    for claim in not_in((ROOT / "README.md").read_text(encoding="utf-8"), claims):
        say(f"README.md does not say {claim.readme!r} any more ({claim.name})")
        return 2
    names = {name for claim in claims for name in (claim.name, claim.measurement)}
    if unknown := sorted(set(options.only or ()) - names):
        say(f"no claim or measurement is called {', '.join(unknown)}; see --list")
        return 2
    if options.json and not options.json.resolve().parent.is_dir():
        say(f"--json: there is no folder {options.json.parent}")
        return 2
    if options.json and options.json.is_dir():
        say(f"--json: {options.json} is a folder; give the name of a file")
        return 2
    wanted = set(options.only or names)
    chosen = [one for one in claims if {one.name, one.measurement} & wanted]
    if options.list:
        for claim in chosen:
            what = claim.says or claim.readme
            print(f"{claim.name}: {what}: {claim.target()} ({claim.source}; {claim.measurement})")
        return 0
    try:
        with leaving_on_signals():
            keep = options.json.resolve().parent if options.json else None
            verdicts = run(chosen, measurements, keep)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    show(verdicts)
    if options.json:
        whole = {"machine": machine(), "commit": commit(), "claims": verdicts}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if all(row["reached"] for row in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
