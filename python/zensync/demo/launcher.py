"""Runs the demo: gets the text, makes the network, starts one process per rank, reports.

`run_demo` is what `zensync demo` calls. As root it makes a slow-link network (zensync.lab), else
it uses loopback, and it says which and why; a network that was asked for by name and can't be made
is an error. Talk and progress go to stderr, the table to stdout. Only processes started here are
ever ended; on Linux they end with this one, even if it is killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zensync.demo import report
from zensync.demo.config import Config, Options, RankResult
from zensync.demo.data import Corpus, data_folder, prepare
from zensync.lab.slow_net import INTERFACE, LinkSpec, SlowNet, SlowNetError, why_not

_PORT = 29500  # inside the slow network, where nobody else listens
_POLL_S = 0.2
_STOP_S = 5.0
_LOG_LINES = 15
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
    except (DemoError, SlowNetError) as error:
        talk.print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:  # processes and network are gone by now
        talk.print("demo: interrupted", style="red")
        return 130
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(f"network: {setting.network} ({setting.why})", highlight=False)
    console.print(f"text: {setting.text}", highlight=False)
    busy = " – above 0.3: times don't count" if setting.foreign_load > 0.3 else ""
    console.print(f"foreign load: {setting.foreign_load:.2f} cores{busy}", highlight=False)
    goals = report.targets(runs)
    report.show(console, runs, [*verdicts, *goals])
    if options.json_file:
        report.write_json(options.json_file, runs, setting)
    judged = [*verdicts, *goals] if options.strict else verdicts
    return 0 if all(verdict.holds for verdict in judged) else 1


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
        ranks, load = _Ranks(config, net, options.timeout_s).run(talk)
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


def _busy_s() -> float:
    """CPU seconds that all programs but this one have used; interrupts are left out."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, stolen = (int(fields[i]) for i in (0, 1, 2, 7))
    every = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
    return every - sum(os.times()[:2])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Ranks:
    """The processes of one run."""

    def __init__(self, config: Config, net: SlowNet | None, timeout_s: float) -> None:
        self._config = config
        self._net = net
        self._timeout_s = timeout_s
        self._folder = Path(config.folder)
        self._port = _PORT if net else _free_port()
        self._children: list[subprocess.Popen[str]] = []
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()

    def run(self, talk: Console) -> tuple[list[RankResult], float]:
        """What every rank measured, and the foreign load meanwhile (cores)."""
        self._config.save(self._folder / "config.json")
        try:
            for rank in range(self._config.ranks):
                self._start(rank)
            with _progress(talk, self._config) as progress:
                elapsed, busy = self._watch(progress)
        finally:
            self._stop()
        ranks = [RankResult.load(self._folder, rank) for rank in range(self._config.ranks)]
        own = sum(rank.cpu_s for rank in ranks)
        return ranks, max(0.0, (busy - own) / elapsed)

    def _start(self, rank: int) -> None:
        command = [sys.executable, "-m", "zensync.demo.worker"]
        command += ["--config", str(self._folder / "config.json"), "--rank", str(rank)]
        command += ["--parent", str(os.getpid())]
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        if self._net:
            command = self._net.command(rank, command)
            environment |= self._net.environment(rank)
        elif sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        with self._log(rank).open("w") as log:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )
        self._children.append(child)
        if child.stdout is not None:
            threading.Thread(target=self._listen, args=(child.stdout,), daemon=True).start()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith("{"):
                self._events.put(json.loads(line))

    def _watch(self, progress: _Shown) -> tuple[float, float]:
        """Follows the ranks to their end. Returns the measured part's seconds and CPU seconds."""
        deadline = time.monotonic() + self._timeout_s
        window: list[tuple[float, float]] = []  # the clock and the CPU time, at start and end
        while True:
            try:
                event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                event = {}
            if event.get("event") in ("ready", "measured"):
                window.append((time.monotonic(), _busy_s()))
            elif event:
                progress.step(event)
            for rank, child in enumerate(self._children):
                if child.poll() not in (None, 0):
                    raise DemoError(self._post_mortem(rank, child.returncode))
            if all(child.returncode == 0 for child in self._children) and self._events.empty():
                (began, busy), (ended, busy_after) = window
                return ended - began, busy_after - busy
            if time.monotonic() > deadline:
                raise DemoError(f"not done after {self._timeout_s:.0f} s; stopped")

    def _post_mortem(self, rank: int, status: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n  ".join([f"rank {rank} ended with status {status}; its last words:", *lines])

    def _stop(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + _STOP_S
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


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
