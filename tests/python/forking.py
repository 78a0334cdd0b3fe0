"""Starts ranks: one helper process (`serve`) has torch and zensync imported and forks each of them.

A rank forms a Gloo group, runs a body and ends as any program does: exceptions go through, the
interpreter is torn down. So it starts in milliseconds, and every test is one of "fork after import"
as well. The helper process ends its ranks when it ends itself, or when nobody listens any more.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zensync
from ranks import RESOLVER

_CLONE_NEWNET = 0x40000000
_HERE = Path(__file__).resolve().parent
POLL_S = 0.005


@dataclass(frozen=True)
class Setup:
    """How ranks run. namespaces: one network namespace a rank, that of rank 0 has `address`."""

    transport: str = "native"
    env: dict[str, str] = field(default_factory=dict)
    group: bool = True
    destroy: bool = True
    group_timeout_s: float = 60.0
    namespaces: tuple[str, ...] = ()
    address: str = "127.0.0.1"

    def environment(self, rank: int) -> dict[str, str]:
        transport = {} if self.transport == "native" else {"ZENSYNC_TRANSPORT": self.transport}
        return {**transport, **self.env}


class Me:
    """A rank, inside its body."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.warnings: list[str] = []
        self.note: Any = None  # told to the test also when the body raises

    def mark(self, name: str) -> None:
        """Tells the test that this rank is there, with the time."""
        write(self.folder / f"{name}.{self.rank}", repr(time.monotonic()).encode())

    def told(self, name: str) -> bool:
        """Whether the test has told `name`."""
        return (self.folder / f"{name}.told").exists()

    def await_told(self, name: str, timeout_s: float = 60.0) -> None:
        poll(lambda: self.told(name), timeout_s, f"rank {self.rank} was not told {name}")


class _Keeper(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


def poll(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < until, f"{what} within {timeout_s:.0f} s"
        time.sleep(POLL_S)


def write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


# ---- the process that forks ranks


def serve() -> None:
    """Forks a rank for every path that comes in, says who ended; ends its ranks when it ends."""
    import pytest  # noqa: F401  (so that ranks need not)

    living: set[int] = set()
    buffer = b""
    _say({"ready": zensync.__file__})
    try:
        while True:
            if select.select([0], [], [], 0.02 if living else None)[0]:
                chunk = os.read(0, 65536)
                if not chunk:
                    break
                buffer += chunk
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                pid = os.fork()
                if pid == 0:
                    living = set()
                    return _run_rank(Path(line.decode()))  # and its interpreter ends
                living.add(pid)
                _say({"forked": pid})
            for pid in list(living):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    living.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    _say({"ended": pid, "code": code, "at": time.monotonic()})
    finally:
        for pid in living:
            os.kill(pid, signal.SIGKILL)


def _say(words: dict[str, Any]) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _run_rank(path: Path) -> None:
    os.setsid()  # what it leaves behind can be found
    log = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    job = pickle.loads(path.read_bytes())
    setup: Setup = job["setup"]
    os.environ.update(setup.environment(job["rank"]))
    if setup.namespaces:
        with open(f"/run/netns/{setup.namespaces[job['rank']]}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    torch.set_num_threads(1)
    me = Me(job["rank"], job["size"], path.parent)
    logging.getLogger("zensync").addHandler(_Keeper(me.warnings))
    end: dict[str, Any] = {"value": None, "error": None, "warnings": me.warnings}
    try:
        if setup.group:
            dist.init_process_group(
                "gloo",
                init_method=job["init_method"],
                rank=me.rank,
                world_size=me.size,
                timeout=timedelta(seconds=setup.group_timeout_s),
            )
        end["value"] = pickle.loads(job["body"])(me, *job["args"])
        if setup.destroy and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as why:
        end["error"] = f"{type(why).__name__}: {why}"
        raise
    finally:
        if os.getpid() == os.getsid(0):  # not in a child of it
            write(path.with_suffix(".end"), pickle.dumps({**end, "note": me.note}))


# ---- the test's side


class Forks:
    """The helper process, as tests see it. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = b""
        self._ended: dict[int, tuple[int, float]] = {}
        self._forked: list[int] = []
        paths = [str(_HERE), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        env.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", **RESOLVER)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import forking; forking.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self._imported = ""
        with self._lock:
            self._pump(lambda: bool(self._imported))
        assert self._imported == zensync.__file__, "ranks import another zensync than the tests"

    def fork(self, path: Path) -> int:
        assert self._process.stdin is not None
        with self._lock:
            os.write(self._process.stdin.fileno(), f"{path}\n".encode())
            self._pump(lambda: bool(self._forked))
            return self._forked.pop()

    def ended(self, pid: int) -> tuple[int, float] | None:
        """Exit code and time, once it has ended."""
        with self._lock:
            self._pump(lambda: True)
            return self._ended.get(pid)

    def _pump(self, enough: Callable[[], bool]) -> None:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        while select.select([source], [], [], 0)[0] or not enough():
            chunk = os.read(source, 65536)
            assert chunk, "the process that forks ranks has ended"
            self._buffer += chunk
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                self._note(json.loads(line))

    def _note(self, words: dict[str, Any]) -> None:
        if "ready" in words:
            self._imported = words["ready"]
        elif "forked" in words:
            self._forked.append(words["forked"])
            self._ended.pop(words["forked"], None)  # of an earlier process with this number
        else:
            self._ended[words["ended"]] = (words["code"], words["at"])


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def state_of(pid: int) -> tuple[str, int]:
    """State and session of a process; ("", 0) if there is none, or only its exit code is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return ("", 0) if fields[0] == "Z" else (fields[0], int(fields[3]))
