"""Runs `zensync bench` as one of the ranks that torchrun (or another launcher) has started.

RANK and WORLD_SIZE in the environment say so. Rank 0 makes the rows; the others only take part.
Inside a slow-link network that somebody else has made, ZS_RATE and its like say what links can do.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from ..lab.slow_net import INTERFACE
from .config import Config
from .launcher import require_cases, steps_of, with_tokens
from .options import Place, parse_burst, parse_rate


def world() -> tuple[int, int] | None:
    """(rank, number of ranks) if this process was started as one of several, else None."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None


def located(config: Config, place: Place) -> tuple[Config, Place]:
    """The run as it is where ranks were started inside a slow-link network (tools/slow_net.py)."""
    rate = os.environ.get("ZS_RATE")
    if rate is None:
        return config, place
    found = replace(
        config,
        hosts=int(os.environ["ZS_HOSTS"]),
        rate_bits_per_s=parse_rate(rate),
        burst_bytes=parse_burst(os.environ["ZS_BURST"]),
        interface=INTERFACE,
    )
    return found, replace(place, rate=rate)


def run(config: Config, place: Place, rank: int) -> tuple[list[dict[str, Any]], int]:
    """Rows (on rank 0) and the number of wrong elements (on every rank)."""
    from .worker import run_rank  # not earlier: it is a program as well, which must be fresh then

    if config.transport is not None:
        os.environ["ZENSYNC_TRANSPORT"] = config.transport
    config = with_tokens(config, place, _say if rank == 0 else _be_silent)
    require_cases(config)
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

    wrong = run_rank(config, rank, tell)
    return rows, wrong


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr)


def _be_silent(_text: str) -> None:
    pass
