"""Runs `zensync bench` on ranks of its own: makes the network, starts them, collects rows.

With a rate the ranks live in the slow-link network, else on loopback. Talk and progress go to
stderr. All that is started here has ended, and the network is gone, when `launch` returns or
raises: RanksError, SlowNetError, PatternError, KeyboardInterrupt.
"""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..lab.processes import Ranks, RanksError, leaving_on_signals
from ..lab.slow_net import INTERFACE, LinkSpec, SlowNet, SlowNetError, why_not
from .config import Config
from .options import Place
from .patterns import PatternError, units_of
from .values import largest_value

Row = dict[str, Any]


def launch(config: Config, place: Place) -> list[Row]:
    """The rows of a run on ranks that are started here."""
    if importlib.util.find_spec("torch") is None:
        raise RanksError("synchronisations are measured with torch: pip install 'zensync[torch]'")
    if place.rate is not None and (reason := why_not()) is not None:
        raise SlowNetError(f"--rate: a slow-link network {reason}")
    config = with_tokens(config, place, _say)
    require_cases(config)
    with ExitStack() as stack:
        stack.enter_context(leaving_on_signals())
        net = None
        if place.rate is not None:
            burst = f"{config.burst_bytes >> 10}kb"
            spec = LinkSpec(rate=place.rate, burst=burst)
            net = stack.enter_context(SlowNet(config.hosts, spec, label="bench"))
            config = replace(config, interface=INTERFACE)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zensync-bench-")))
        ranks = stack.enter_context(Ranks(config.ranks, folder, net))
        variables = {} if config.transport is None else {"ZENSYNC_TRANSPORT": config.transport}
        ranks.start("zensync.bench.worker", config, variables)
        return _follow(ranks, config, place.timeout_s)


def with_tokens(config: Config, place: Place, say: Any) -> Config:
    """The run, with the text that `vocab` reads; fetched as the demo does it."""
    if "vocab" not in config.patterns:
        return config
    from ..demo.data import data_folder, prepare

    folder = data_folder(place.data)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # ranks of torchrun prepare one after another
        fcntl.flock(lock, fcntl.LOCK_EX)
        corpus = prepare(folder, offline=place.offline, say=say)
    say(f"text: {corpus.source}")
    return replace(config, tokens_file=corpus.tokens_file)


def require_cases(config: Config) -> None:
    """PatternError if a case cannot be had, before any rank is started."""
    try:
        largest_value(config.ranks)
    except ValueError as why:
        raise PatternError(str(why)) from None
    for _, case in config.cases():
        if case.pattern in ("disjoint", "vocab"):
            units_of(case, 0)


def steps_of(config: Config) -> int:
    """Passes of one scheme that a run makes, each with an event."""
    passes = config.warmup + 1 + config.iters
    return sum(1 for _ in config.cases()) * len(config.schemes) * passes


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr)


def _follow(ranks: Ranks, config: Config, timeout_s: float) -> list[Row]:
    rows: list[Row] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[scheme]}"),
        TimeElapsedColumn(),
    )
    # Seldom redrawn: the cores are the ranks'.
    talk = Console(stderr=True)
    with Progress(*columns, console=talk, refresh_per_second=2) as progress:
        bar = progress.add_task("starting", total=steps_of(config), scheme="")
        for event in ranks.events(timeout_s):
            if event["event"] == "row":
                rows.append(event["row"])
            elif event["event"] == "case":
                progress.update(bar, description=event["what"])
            else:
                progress.update(bar, advance=1, scheme=event["scheme"])
    return rows
