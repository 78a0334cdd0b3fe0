"""Judges a run of the demo and shows it: a table on stdout, JSON in a file.

Pure but for `show` and `write_json`: from what the ranks wrote to one `Run` per mode, to paired
ratios, to checks (which decide the exit status) and targets (which do so only when asked).
Warm-up steps are left out of all times and bytes. A step is as slow as its slowest rank; its wire
bytes are those of its busiest rank, the larger of sent and received. Bytes of the tables are the
total less what the barriers round an empty step cost, since the model has no other parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from zensync.demo.config import LAST_STEPS, WARM_UP_STEPS, Config, ModeResult, RankResult
from zensync.lab.load import VOID_ABOVE
from zensync.lab.stats import Ratio, paired_ratio

if TYPE_CHECKING:
    from rich.console import Console

_INDEX_BYTES = 8  # torch's sparse tensors carry int64 indices
LOSS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Setting:
    """Where and on what a run was made."""

    network: str  # "slow 200mbit" or "loopback"
    why: str
    text: str
    foreign_load: float  # cores that others kept busy meanwhile

    @property
    def void(self) -> bool:
        """Whether others were so busy that times don't count."""
        return self.foreign_load > VOID_ABOVE


@dataclass(frozen=True)
class Run:
    """One mode, over all ranks."""

    mode: str
    loss: float  # mean of the last steps
    steps_per_s: float
    wire_bytes: float  # per step, busiest rank
    wire_bytes_tables: float
    sync_s: float  # per step, slowest rank
    bitwise_equal: bool
    network: str
    wire_bytes_by: str
    local_s: float  # CPU seconds per step and rank
    losses: list[float]
    first_batch_after: float
    step_s: list[float]


@dataclass(frozen=True)
class Verdict:
    """One thing that must hold, whether it does, and the figures.

    void: it is about times, and those of this run don't count.
    """

    name: str
    holds: bool
    figures: str
    void: bool = False

    @property
    def word(self) -> str:
        """ok, FAIL or void."""
        if self.void:
            return "void"
        return "ok" if self.holds else "FAIL"


def _timed(values: Sequence[float]) -> list[float]:
    return list(values[WARM_UP_STEPS:])


def _slowest(
    ranks: Sequence[RankResult], mode: str, of: Callable[[ModeResult], list[float]]
) -> list[float]:
    return [max(step) for step in zip(*(of(rank.modes[mode]) for rank in ranks), strict=True)]


def _counted_bytes(ranks: Sequence[RankResult], mode: str, *, idle: bool) -> float:
    """Busiest rank's bytes, mean over the timed steps; `idle`: barriers included."""
    steps = []
    for rank in ranks:
        seen = rank.modes[mode]
        less = (0, 0) if idle else (rank.idle_sent_bytes, rank.idle_received_bytes)
        pairs = zip(seen.sent_bytes, seen.received_bytes, strict=True)
        steps.append([max(sent - less[0], received - less[1]) for sent, received in pairs])
    return float(numpy.mean(_timed([max(step) for step in zip(*steps, strict=True)])))


def _computed_bytes(ranks: Sequence[RankResult], config: Config, mode: str) -> float:
    """What torch's algorithms send: a ring for dense, everybody's rows to everybody for sparse."""
    share = (config.ranks - 1) / config.ranks
    if mode == "dense":
        return 2 * share * config.table_bytes
    rows = [sum(step) for step in zip(*(rank.modes[mode].rows for rank in ranks), strict=True)]
    return share * float(numpy.mean(_timed(rows))) * (4 * config.dim + _INDEX_BYTES)


def summarise(ranks: Sequence[RankResult], config: Config, setting: Setting) -> list[Run]:
    """One run per mode."""
    return [_summarise_mode(ranks, config, setting, mode) for mode in config.modes]


def _summarise_mode(
    ranks: Sequence[RankResult], config: Config, setting: Setting, mode: str
) -> Run:
    if config.interface:
        by = "interface counters"
        wire = _counted_bytes(ranks, mode, idle=True)
        tables = _counted_bytes(ranks, mode, idle=False)
    elif mode == "zensync":
        by = "its own count"
        wire = tables = _counted_bytes(ranks, mode, idle=True)
    else:
        by = "computed"
        wire = tables = _computed_bytes(ranks, config, mode)
    losses = numpy.mean([rank.modes[mode].loss for rank in ranks], axis=0)
    step_s = _slowest(ranks, mode, lambda seen: seen.step_s)
    return Run(
        mode=mode,
        loss=float(losses[-LAST_STEPS:].mean()),
        steps_per_s=1 / float(numpy.median(_timed(step_s))),
        wire_bytes=wire,
        wire_bytes_tables=tables,
        sync_s=float(numpy.median(_timed(_slowest(ranks, mode, lambda seen: seen.sync_s)))),
        bitwise_equal=len({rank.modes[mode].digest for rank in ranks}) == 1
        and all(rank.modes[mode].equal_digests for rank in ranks),
        network=setting.network,
        wire_bytes_by=by,
        local_s=float(numpy.mean([_timed(rank.modes[mode].local_s) for rank in ranks])),
        losses=losses.tolist(),
        first_batch_after=float(numpy.mean([rank.modes[mode].first_batch_after for rank in ranks])),
        step_s=step_s,
    )


def time_ratio(slow: Run, fast: Run) -> Ratio:
    """How many times longer `slow`'s steps took, step against step (median, bootstrap)."""
    return paired_ratio(_timed(slow.step_s), _timed(fast.step_s))


def checks(runs: Sequence[Run]) -> list[Verdict]:
    """What must hold on any network."""
    by_mode = {run.mode: run for run in runs}
    found = []
    for run in runs:
        # The stock modes are shown but not judged: their bits are torch's affair.
        if run.mode == "zensync" or "zensync" not in by_mode:
            found.append(Verdict("weights bitwise equal on all ranks", run.bitwise_equal, run.mode))
        # On one and the same batch: batches differ by more than twenty steps gain.
        before, after = run.losses[0], run.first_batch_after
        figures = f"{run.mode}: {before:.4f} → {after:.4f}"
        found.append(Verdict("loss of the first batch goes down", after < before, figures))
    if {"dense", "zensync"} <= by_mode.keys():
        ours, dense = by_mode["zensync"].loss, by_mode["dense"].loss
        off = abs(ours / dense - 1)
        figures = f"{ours:.5f} against {dense:.5f}: {off:.4%} off"
        found.append(
            Verdict("mean loss of the last steps ≤ 1 % off dense", off <= LOSS_TOLERANCE, figures)
        )
    return found


def targets(runs: Sequence[Run], void: bool) -> list[Verdict]:
    """What zensync is for; judged where bytes and links are real (all modes, slow network).

    void: times don't count; what is said of bytes does.
    """
    by_mode = {run.mode: run for run in runs}
    if not {"dense", "sparse", "zensync"} <= by_mode.keys():
        return []
    ours = by_mode["zensync"]
    if ours.wire_bytes_by != "interface counters":
        return []
    found = []
    for rival, most, least in (("sparse", 0.75, 1.0), ("dense", 0.12, 4.0)):
        run = by_mode[rival]
        part = ours.wire_bytes_tables / run.wire_bytes_tables
        name = f"table bytes ≤ {most} × {rival}'s"
        found.append(Verdict(name, part <= most, f"{part:.3f}"))
        times = time_ratio(run, ours)
        name = f"steps/s {'≥ 4 ×' if least > 1 else 'more than'} {rival}'s"
        # An interval that reaches below the target decides nothing in zensync's favour.
        found.append(Verdict(name, times.low > least, _ratio_text(times), void))
    return found


def _ratio_text(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} × (95 %: {ratio.low:.2f}–{ratio.high:.2f})"


def _bytes_text(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e4 else f"{count:.0f} B"


def show(console: Console, runs: Sequence[Run], verdicts: Sequence[Verdict]) -> None:
    """The table, the ratios and the verdicts."""
    from rich.table import Table

    table = Table(title="per step; bytes of the busiest rank, seconds of the slowest")
    table.add_column("")
    for run in runs:
        table.add_column(run.mode, justify="right")
    lines: list[tuple[str, Callable[[Run], str]]] = [
        (f"loss (last {LAST_STEPS})", lambda run: f"{run.loss:.5f}"),
        ("steps/s", lambda run: f"{run.steps_per_s:.3g}"),
        ("wire bytes, total", lambda run: _bytes_text(run.wire_bytes)),
        ("wire bytes, tables", lambda run: _bytes_text(run.wire_bytes_tables)),
        ("counted by", lambda run: run.wire_bytes_by),
        ("in synchronisation", lambda run: f"{run.sync_s:.3f} s"),
        ("CPU, a rank", lambda run: f"{run.local_s:.3f} s"),
        ("ranks bitwise equal", lambda run: "yes" if run.bitwise_equal else "NO"),
    ]
    ours = next((run for run in runs if run.mode == "zensync"), None)
    if ours is not None:
        lines += [
            (
                "table bytes, zensync / this",
                lambda run: f"{ours.wire_bytes_tables / run.wire_bytes_tables:.3f}",
            ),
            ("step time, this / zensync", lambda run: _ratio_text(time_ratio(run, ours))),
        ]
    for title, cell in lines:
        table.add_row(title, *(cell(run) for run in runs))
    console.print(table)
    for verdict in verdicts:
        colour = {"ok": "green", "FAIL": "red", "void": "yellow"}[verdict.word]
        console.print(
            f"[{colour}]{verdict.word:<4}[/] {verdict.name} ({verdict.figures})", highlight=False
        )


def write_json(
    path: Path, runs: Sequence[Run], setting: Setting, verdicts: Sequence[Verdict]
) -> None:
    """A list with one object per run; times in seconds, sizes in bytes, per step and rank.

    What holds for all runs stands in each: text, load, whether times are void, verdicts.
    """
    judged = [{"name": one.name, "is": one.word, "figures": one.figures} for one in verdicts]
    common = {
        "text": setting.text,
        "foreign_load": setting.foreign_load,
        "void": setting.void,
        "why": setting.why,
        "verdicts": judged,
    }
    path.write_text(json.dumps([asdict(run) | common for run in runs], indent=1) + "\n")
