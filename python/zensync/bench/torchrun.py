"""Runs `zensync bench` as one of the ranks that torchrun (or another launcher) has started.

RANK and WORLD_SIZE in the environment say so. Rank 0 makes the rows; the others only take part.
Inside a slow-link network that somebody else has made, ZS_RATE and its like say what links can do.
What these variables leave open is a ValueError; a run that takes too long ends the process, since a
wait inside torch can't be interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from typing import Any, NoReturn, Self

from ..errors import Error
from ..lab.processes import RanksError
from ..lab.slow_net import INTERFACE
from .config import Config
from .launcher import require_cases, steps_of, with_tokens
from .options import Place, parse_burst, parse_rate

_LAST_PORT = 65535
_CANNOT_RUN = 2


class AloneError(RanksError):
    """This rank did not meet the others; each rank says so for itself."""


def world() -> tuple[int, int] | None:
    """(rank, number of ranks) if this process was started as one of several, else None."""
    if not os.environ.get("RANK") and not os.environ.get("WORLD_SIZE"):
        return None
    size = _whole("WORLD_SIZE")
    if size < 1:
        raise ValueError(f"WORLD_SIZE is {size}; it must be at least 1")
    rank = _whole("RANK")
    if not 0 <= rank < size:
        raise ValueError(f"RANK is {rank}; of WORLD_SIZE {size} it must be 0 to {size - 1}")
    _launchers("MASTER_ADDR")
    port = _whole("MASTER_PORT")
    if not 1 <= port <= _LAST_PORT:
        raise ValueError(f"MASTER_PORT is {port}; it must be 1 to {_LAST_PORT}")
    return rank, size


def _launchers(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(
            f"{name} is not set; a launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            "(without the first two the bench starts ranks of its own)"
        )
    return value


def _whole(name: str) -> int:
    text = _launchers(name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, not a whole number") from None


def located(config: Config, place: Place) -> tuple[Config, Place]:
    """The run as it is where ranks were started inside a slow-link network (tools/slow_net.py)."""
    rate = os.environ.get("ZS_RATE")
    if rate is None:
        return config, place
    hosts, burst = (os.environ.get(name, "") for name in ("ZS_HOSTS", "ZS_BURST"))
    if not hosts or not burst:
        missing = "ZS_BURST" if hosts else "ZS_HOSTS"
        raise ValueError(f"ZS_RATE is set and {missing} is not; tools/slow_net.py sets both")
    found = replace(
        config,
        hosts=_whole("ZS_HOSTS"),
        rate_bits_per_s=parse_rate(rate),
        burst_bytes=parse_burst(burst),
        interface=INTERFACE,
    )
    if (problem := found.problem()) is not None:
        raise ValueError(f"as ZS_RATE, ZS_HOSTS and ZS_BURST have it: {problem}")
    return found, replace(place, rate=rate)


def run(config: Config, place: Place, rank: int) -> tuple[list[dict[str, Any]], int]:
    """Rows (on rank 0) and the number of wrong elements (on every rank)."""
    from .worker import meet  # not earlier: it is a program as well, which must be fresh then

    if config.transport is not None:
        os.environ["ZENSYNC_TRANSPORT"] = config.transport
    with _Bound(place.timeout_s) as bound:
        config = with_tokens(config, place, _say if rank == 0 else _be_silent)
        require_cases(config)
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        bound.text = f"rank {rank} of {config.ranks} has not met the others at {where}"
        try:
            meet(config, rank)
        except RuntimeError as why:  # of torch; behind its first line stands a trace of C++
            raise AloneError(f"{bound.text}: {_first_line(why)}") from why
        bound.text = "not done"
        if rank != 0:  # one watch, so that it is no matter of chance who ends first and says what
            bound.lift()
        try:
            return _measured(config)
        except RuntimeError as why:
            if isinstance(why, Error) or "gloo" not in str(why).lower():
                raise
            _end_process(f"rank {rank} has lost another rank: {_first_line(why)}")


def _end_process(text: str) -> NoReturn:
    """Without the interpreter's end, which threads of a broken group may not survive."""
    sys.stderr.write(f"zensync bench: {text}\n")
    sys.stderr.flush()
    os._exit(_CANNOT_RUN)


def _first_line(why: RuntimeError) -> str:
    return str(why).strip().splitlines()[0]


def _measured(config: Config) -> tuple[list[dict[str, Any]], int]:
    from .worker import take_part

    rows: list[dict[str, Any]] = []
    done = 0

    def tell(event: dict[str, Any]) -> None:
        nonlocal done
        if event["event"] == "row":
            rows.append(event["row"])
        elif event["event"] == "case":
            _say(f"{event['what']} ({done} of {steps_of(config)} passes done)")
        else:
            done += 1

    wrong = take_part(config, tell)
    return rows, wrong


class _Bound:
    """Ends this process with one line (its `text`) and status 2 when the time is over."""

    def __init__(self, timeout_s: float) -> None:
        self.text = "not done"
        self._timeout_s = timeout_s
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def _end(self) -> None:
        _end_process(f"{self.text} after {self._timeout_s:g} s; stopped")

    def lift(self) -> None:
        """From here on there is no bound."""
        self._timer.cancel()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.lift()


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr)


def _be_silent(_text: str) -> None:
    pass
