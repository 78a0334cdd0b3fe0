"""Ranks as real processes that may die, stop, raise or hang, and what the tests ask of them.

Ranks and tests tell each other what they have reached by marks (files), not by sleeping. Only
processes that were started here are signalled, by pid, and none is left when `Ranks` is left.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zensync
from forking import POLL_S, Forks, Me, Setup, all_pids, poll, state_of, write
from ranks import free_port

TRANSPORTS = ("native", "torch")


def on_both(cases: Iterable[Any], quick: Iterable[Any] = ()) -> list[Any]:
    """Parameters (transport, *case). Over torch those not in `quick` are slow ones: they show what
    the native ones show, and the default run stays short."""
    quick = list(quick)
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param("native", *values))
        marks = () if case in quick else pytest.mark.slow
        params.append(pytest.param("torch", *values, marks=marks))
    return params


def bound(seconds: float) -> float:
    """A bound of the failure protocol, three times as long while the machine is overloaded."""
    return seconds * (3.0 if os.getloadavg()[0] > (os.cpu_count() or 1) else 1.0)


# ---- what a rank sees


@dataclass
class Outcome:
    """How a call ended on one rank. kind: the error's class, None without an error."""

    kind: str | None = None
    culprit: int | None = None
    rank: int | None = None
    tensor: str | None = None
    message: str = ""
    began: float = 0.0
    at: float = 0.0  # of the clock that all processes share

    @property
    def seconds(self) -> float:
        return self.at - self.began


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Makes a call and says how it ended. Only errors of zensync are outcomes."""
    began = time.monotonic()
    try:
        call()
    except zensync.Error as why:
        return describe(why, began)
    return Outcome(began=began, at=time.monotonic())


def describe(why: zensync.Error, began: float = 0.0) -> Outcome:
    kind = type(why).__name__
    now = time.monotonic()
    return Outcome(kind, why.culprit, why.rank, why.tensor, why.message, began, now)


def require_same(
    outcomes: dict[int, Outcome],
    kinds: Iterable[str],
    *,
    culprit: int | None = None,
    until: float = float("inf"),
) -> None:
    """All ranks of `outcomes` had an error of one class (among `kinds`) with one culprit (the
    given one, if given; never None), and not later than `until`."""
    shown = "\n".join(f"rank {rank}: {outcome}" for rank, outcome in outcomes.items())
    assert outcomes, "no rank"
    for outcome in outcomes.values():
        assert outcome.kind in set(kinds), f"kind among {kinds}:\n{shown}"
        assert outcome.culprit is not None, f"nobody is named:\n{shown}"
        late = outcome.at - until
        assert late <= 0, f"{late:.1f} s too late:\n{shown}"
    assert len({outcome.kind for outcome in outcomes.values()}) == 1, f"classes differ:\n{shown}"
    assert len({one.culprit for one in outcomes.values()}) == 1, f"culprits differ:\n{shown}"
    if culprit is not None:
        assert all(one.culprit == culprit for one in outcomes.values()), f"not {culprit}:\n{shown}"


# ---- sums that the bodies make

FLAG = 2.0**20  # in row 0: rank 0 has been told "finish"


def table(rank: int, turn: int = 0, full: bool = False) -> torch.Tensor:
    """What a rank gives in one turn; row 0 is left for the flag. Sums of it are exact."""
    if full:
        return torch.full((4000, 8), float(rank + 1 + turn % 5))
    tensor = torch.zeros(600, 4)
    tensor[1 + (rank + turn) % 7 :: 50] = rank + 1
    return tensor


def total(ranks: Iterable[int], turn: int = 0, full: bool = False) -> torch.Tensor:
    return torch.stack([table(rank, turn, full) for rank in ranks]).sum(0)


def add_up(me: Me, state: Any, turn: int, *, full: bool = False, name: str = "weights") -> bool:
    """One sum, checked on the spot. Whether rank 0 had been told "finish"."""
    tensor = table(me.rank, turn, full)
    tensor[0] = FLAG if me.rank == 0 and me.told("finish") else 0
    zensync.all_reduce(tensor, name=name, state=state)
    right = torch.equal(tensor[1:], total(range(me.size), turn, full)[1:])
    assert right, f"rank {me.rank}: a wrong sum in turn {turn}"
    return bool(tensor[0, 0] == FLAG)


def until_told(me: Me, state: Any, *, full: bool = False) -> int:
    """Sums until rank 0 was told "finish", on all ranks the same number; marks "busy" early."""
    turn = 0
    while not add_up(me, state, turn, full=full):
        turn += 1
        if turn == 3:
            me.mark("busy")
    return turn


# ---- the test's side


@dataclass
class End:
    """How a rank ended. code: as in subprocess; value, error: of its body, if it came to that."""

    code: int
    at: float
    value: Any
    error: str | None
    warnings: list[str]
    note: Any
    log: str


_forks: list[Forks] = []


class Ranks:
    """`size` processes that run body(me, *args). A context manager: none is left behind."""

    def __init__(self, size: int, body: Callable[..., Any], *args: Any, setup: Setup) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="zensync-test-"))
        self.pids: list[int] = []
        if not _forks:
            _forks.append(Forks())
        try:
            for rank in range(size):
                self._start(rank, body, args, setup)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, rank: int, body: Callable[..., Any], args: Any, setup: Setup) -> None:
        if rank == 0:
            self._init_method = f"tcp://{setup.address}:{free_port()}"
        job = {"rank": rank, "size": self.size, "setup": setup, "args": args}
        job.update(init_method=self._init_method, body=pickle.dumps(body))
        path = self.folder / f"rank{rank}.job"
        path.write_bytes(pickle.dumps(job))
        self.pids.append(_forks[0].fork(path))

    def tell(self, name: str) -> None:
        write(self.folder / f"{name}.told", b"")

    def await_mark(self, name: str, ranks: Iterable[int] | None = None) -> list[float]:
        """Waits until ranks (all, unless given) have reached `name`; when each did."""
        paths = [self.folder / f"{name}.{rank}" for rank in ranks or range(self.size)]

        def there() -> bool:
            for rank in range(self.size):
                code = self.code(rank)
                failed = code not in (None, 0) and not (self.folder / f"{name}.{rank}").exists()
                assert not (failed and rank in (ranks or [rank])), (
                    f"rank {rank} ended with {code} before it reached {name}\n{self._log(rank)}"
                )
            return all(path.exists() for path in paths)

        poll(there, 60.0, f"ranks did not reach {name}")
        return [float(path.read_text()) for path in paths]

    def code(self, rank: int) -> int | None:
        """Its exit code; None while it runs."""
        ended = _forks[0].ended(self.pids[rank])
        return None if ended is None else ended[0]

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal; the time just before. Waits until SIGKILL and SIGSTOP have worked."""
        began = time.monotonic()
        if self.code(rank) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)
        if number == signal.SIGKILL:
            poll(lambda: self.code(rank) is not None, 20.0, f"rank {rank} did not end")
        if number == signal.SIGSTOP:
            poll(lambda: state_of(self.pids[rank])[0] == "T", 20.0, f"rank {rank} did not stop")
        return began

    def end(self, ranks: Iterable[int] | None = None, timeout_s: float = 60.0) -> dict[int, End]:
        """Waits until ranks (all, unless given) have ended by themselves."""
        until = time.monotonic() + timeout_s
        wanted = list(range(self.size) if ranks is None else ranks)
        while hanging := [rank for rank in wanted if self.code(rank) is None]:
            if time.monotonic() > until:
                for rank in hanging:  # where it hangs is in its log then
                    self.signal(rank, signal.SIGUSR1)
                time.sleep(0.5)
                logs = "\n".join(self._log(rank) for rank in hanging)
                raise AssertionError(f"ranks {hanging} did not end in {timeout_s:.0f} s\n{logs}")
            time.sleep(POLL_S)
        return {rank: self._end_of(rank) for rank in wanted}

    def _end_of(self, rank: int) -> End:
        code, at = _forks[0].ended(self.pids[rank]) or (0, 0.0)
        path = self.folder / f"rank{rank}.end"
        said = {"value": None, "error": None, "warnings": [], "note": None}
        if path.exists():
            said = pickle.loads(path.read_bytes())
        return End(code, at, **said, log=self._log(rank))

    def _log(self, rank: int) -> str:
        path = self.folder / f"rank{rank}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"-- log of rank {rank}:\n{text[-4000:]}"

    def values(self, ranks: Iterable[int] | None = None, timeout_s: float = 60.0) -> dict[int, Any]:
        """What the bodies returned; an AssertionError unless all ended with exit code 0."""
        ends = self.end(ranks, timeout_s)
        for rank, end in ends.items():
            assert end.code == 0, f"rank {rank}: exit code {end.code}, {end.error}\n{end.log}"
        return {rank: end.value for rank, end in ends.items()}

    def left(self) -> list[int]:
        """Processes that ranks started and that are still there."""
        return [pid for pid in all_pids() if state_of(pid)[1] in self.pids and pid not in self.pids]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in range(len(self.pids)):
            self.signal(rank, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
