"""Runs the demo: gets the text, makes the network, starts one process per rank, reports.

`run_demo` is what `zensync demo` calls. As root it makes a slow-link network (zensync.lab), else
it uses loopback, and it says which and why; a network that was asked for by name and can't be made
is an error. Talk and progress go to stderr, the table to stdout.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zensync.demo import report
from zensync.demo.config import Config, Options, RankResult
from zensync.demo.data import Corpus, data_folder, prepare
from zensync.lab.load import VOID_ABOVE, busy_s, own_s
from zensync.lab.processes import Ranks, RanksError
from zensync.lab.slow_net import INTERFACE, LinkSpec, SlowNet, SlowNetError, why_not

_WIDTH = 120  # of a table that goes to a file


class DemoError(RuntimeError):
    """The demo could not run to its end."""


def run_demo(options: Options) -> int:
    """Runs the demo; 0 if all checks hold, 1 if not, 2 if it could not run, 130 if interrupted."""
    talk = Console(stderr=True)
    problem = options.problem()
    if problem:
        talk.print(f"demo: {problem}", style="red")
        return 2
    try:
        runs, verdicts, setting = _run(options, talk)
    except (DemoError, RanksError, SlowNetError) as error:
        talk.print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:  # processes and network are gone by now
        talk.print("demo: interrupted", style="red")
        return 130
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(f"network: {setting.network} ({setting.why})", highlight=False)
    console.print(f"text: {setting.text}", highlight=False)
    busy = f" – above {VOID_ABOVE}: times don't count" if setting.void else ""
    console.print(f"foreign load: {setting.foreign_load:.2f} cores{busy}", highlight=False)
    goals = report.targets(runs, setting.void)
    report.show(console, runs, [*verdicts, *goals])
    if options.json_file:
        report.write_json(options.json_file, runs, setting, [*verdicts, *goals])
    judged = [*verdicts, *goals] if options.strict else verdicts
    return 0 if all(verdict.word == "ok" for verdict in judged) else 1


def _run(
    options: Options, talk: Console
) -> tuple[list[report.Run], list[report.Verdict], report.Setting]:
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo trains with torch: pip install 'zensync[demo]'")

    def say(text: str) -> None:
        talk.print(f"demo: {text}", markup=False, highlight=False, soft_wrap=True)

    corpus = prepare(data_folder(options.data), offline=options.offline, say=say)
    with ExitStack() as stack:
        net, why = _network(options, stack)
        name = f"slow {options.rate}" if net else "loopback"
        say(f"network: {name} ({why})")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zensync-demo-")))
        config = _config(options, corpus, folder, net)
        ranks, load = _measure(config, net, options.timeout_s, talk)
    setting = report.Setting(name, why, corpus.source, load)
    runs = report.summarise(ranks, config, setting)
    return runs, report.checks(runs), setting


def _network(options: Options, stack: ExitStack) -> tuple[SlowNet | None, str]:
    """The network to use (None: loopback) and why; it lives as long as `stack`."""
    if options.network == "loopback":
        return None, "as asked"
    reason = why_not()
    if reason is None:
        try:
            net = stack.enter_context(SlowNet(options.ranks, LinkSpec(rate=options.rate)))
        except SlowNetError as error:
            reason = str(error)
        else:
            return net, f"{options.rate} per process each way, no delay, deep buffers"
    if options.network == "slow":
        raise DemoError(f"the slow-link network can't be made: {reason}")
    return None, f"the slow-link network can't be made: {reason}"


def _config(options: Options, corpus: Corpus, folder: Path, net: SlowNet | None) -> Config:
    return Config(
        ranks=options.ranks,
        steps=options.steps,
        modes=options.modes,
        dim=options.dim,
        negatives=options.negatives,
        tokens_per_rank=options.tokens_per_rank,
        tokens_file=corpus.tokens_file,
        vocabulary=corpus.vocabulary,
        folder=str(folder),
        interface=INTERFACE if net else None,
    )


def _measure(
    config: Config, net: SlowNet | None, timeout_s: float, talk: Console
) -> tuple[list[RankResult], float]:
    """What every rank measured, and the foreign load meanwhile (cores)."""
    folder = Path(config.folder)
    window: list[tuple[float, float]] = []  # the clock and the CPU time, at start and end
    with Ranks(config.ranks, folder, net) as ranks, _progress(talk, config) as progress:
        ranks.start("zensync.demo.worker", config)
        for event in ranks.events(timeout_s):
            if event["event"] in ("ready", "measured"):
                window.append((time.monotonic(), busy_s() - own_s()))
            else:
                progress.step(event)
    results = [RankResult.load(folder, rank) for rank in range(config.ranks)]
    (began, busy), (ended, busy_after) = window
    own = sum(rank.cpu_s for rank in results)
    return results, max(0.0, (busy_after - busy - own) / (ended - began))


class _Shown:
    """One progress bar per mode."""

    def __init__(self, progress: Progress, config: Config) -> None:
        self._progress = progress
        self._bars = {
            mode: progress.add_task(mode, total=config.steps, last="starting")
            for mode in config.modes
        }

    def step(self, event: dict[str, Any]) -> None:
        """Shows one step of one mode."""
        last = f"loss {event['loss']:.4f}, {event['step_s']:.2f} s"
        self._progress.update(self._bars[event["mode"]], advance=1, last=last)


@contextmanager
def _progress(talk: Console, config: Config) -> Iterator[_Shown]:
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=talk) as progress:
        yield _Shown(progress, config)
