"""Starts one process per rank, in a slow-link network or on loopback, and sees to their end.

`zensync demo` and `zensync bench` use it. What the ranks are to do is a dataclass of plain data,
their order, which each of them reads first of all (`taken_order`). Every rank writes to a log of
its own; rank 0 also tells events, one JSON object a line, on its stdout. Only processes started
here are ever ended; on Linux they end with this one, even if it is killed. A rank that fails, or
takes too long, is a `RanksError` with its last words.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from zensync.lab.slow_net import PORT, SIGNALS, SlowNet, leave

_POLL_S = 0.2
_STOP_S = 5.0
_LOG_LINES = 15
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


class RanksError(RuntimeError):
    """The ranks could not run to their end."""


T = TypeVar("T")


def write_plain(path: Path, plain: Any) -> None:
    """Writes a dataclass of plain data."""
    path.write_text(json.dumps(dataclasses.asdict(plain)))


def read_plain(kind: type[T], path: Path) -> T:
    """Reads what `write_plain` wrote. Its sequences are tuples again, as in all that is frozen."""
    fields = json.loads(path.read_text())
    return kind(**{name: tuple(it) if isinstance(it, list) else it for name, it in fields.items()})


def taken_order(kind: type[T]) -> tuple[T, int]:
    """What this program is to do, and as which rank: it is one that `Ranks.start` started.

    From here on it ends with its launcher; so it comes before what takes long to load.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--order", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    _die_with(given.parent)
    return read_plain(kind, given.order), given.rank


def _die_with(parent: int) -> None:
    """A killed launcher must not leave ranks behind. Linux only; elsewhere nothing happens."""
    try:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Turns signals that end a process into exceptions, so that `with` blocks clean up."""
    before: dict[int, Any] = {}
    try:
        for number in SIGNALS:
            before[number] = signal.signal(number, leave)
    except ValueError:  # not the main thread: signals are somebody else's
        pass
    try:
        yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


def host_of(rank: int, ranks: int, hosts: int) -> int:
    """Ranks are spread over hosts in blocks."""
    return rank * hosts // ranks


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Ranks:
    """The processes of one run; a context manager that ends them."""

    def __init__(self, ranks: int, folder: Path, net: SlowNet | None) -> None:
        self._ranks = ranks
        self._folder = folder
        self._net = net
        self._port = PORT if net else _free_port()
        self._children: list[subprocess.Popen[str]] = []
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()

    def start(self, module: str, order: Any, variables: Mapping[str, str] | None = None) -> None:
        """Starts `python -m module` once per rank; it gets the order by `taken_order`."""
        path = self._folder / "order.json"
        write_plain(path, order)
        command = [sys.executable, "-m", module, "--order", str(path), "--parent", str(os.getpid())]
        for rank in range(self._ranks):
            self._start([*command, "--rank", str(rank)], rank, variables)

    def _start(self, command: list[str], rank: int, variables: Mapping[str, str] | None) -> None:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            **(variables or {}),
        }
        if self._net:
            host = host_of(rank, self._ranks, self._net.hosts)
            command = self._net.command(host, command)
            environment |= self._net.environment(host)
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

    def wait(self, timeout_s: float, doomed: Collection[int] = ()) -> None:
        """Waits until all ranks have ended, well but for the doomed ones."""
        for _ in self.events(timeout_s, doomed):
            pass

    def events(self, timeout_s: float, doomed: Collection[int] = ()) -> Iterator[dict[str, Any]]:
        """Rank 0's events until all ranks have ended, well but for the doomed ones."""
        deadline = time.monotonic() + timeout_s
        while True:
            # Asked first: what an ended process told is in the queue by the time that is empty.
            ended = all(child.poll() is not None for child in self._children)
            try:
                yield self._events.get(timeout=_POLL_S)
            except queue.Empty:
                if ended:
                    self._require_healthy(doomed)
                    return
            self._require_healthy(doomed)
            if time.monotonic() > deadline:
                raise RanksError(f"not done after {timeout_s:.0f} s; stopped")

    def _require_healthy(self, doomed: Collection[int]) -> None:
        statuses = [child.poll() for child in self._children]
        failed = [rank for rank, status in enumerate(statuses) if status and rank not in doomed]
        if not failed:
            return
        # Who died of a signal did so by itself; the others often of its absence.
        first = min(failed, key=lambda rank: (self._children[rank].returncode > 0, rank))
        lines = self._log(first).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        head = f"rank {first} ended with status {statuses[first]}; its last words:"
        raise RanksError("\n  ".join([head, *(lines or ["(none)"])]))

    def stop(self) -> None:
        """Ends what still runs."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
