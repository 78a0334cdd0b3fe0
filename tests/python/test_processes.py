"""Ranks as processes: what they are told, how they end, whom a launcher hears of.

This file is also the program that the ranks run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from zensync.lab.processes import Ranks, RanksError, read_plain, taken_order, write_plain


@dataclass(frozen=True)
class Order:
    folder: str
    words: tuple[str, ...] = ("a", "b")
    share: float | None = None
    killed: tuple[int, ...] = ()


def started(folder: Path, order: Order, ranks: int = 3) -> Ranks:
    found = Ranks(ranks, folder, None)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    found.start("test_processes", order, {"PYTHONPATH": path})
    return found


def rank_main() -> None:
    order, rank = taken_order(Order)
    if rank in order.killed:
        print("here I end", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    Path(order.folder, f"{rank}.words").write_text(repr(order))
    if rank == 0:
        print(json.dumps({"event": "told"}), flush=True)


def test_plain_data_comes_back_as_it_was(tmp_path):
    order = Order("x", ("c",), 0.5, (1, 2))
    write_plain(tmp_path / "order", order)
    assert read_plain(Order, tmp_path / "order") == order


def test_every_rank_gets_the_order(tmp_path):
    order = Order(str(tmp_path))
    with started(tmp_path, order) as ranks:
        assert list(ranks.events(60)) == [{"event": "told"}]
    assert [path.read_text() for path in tmp_path.glob("*.words")] == [repr(order)] * 3


def test_a_killed_rank_is_an_error_unless_it_is_doomed(tmp_path):
    order = Order(str(tmp_path), killed=(1,))
    with started(tmp_path, order) as ranks, pytest.raises(RanksError, match="here I end") as caught:
        ranks.wait(60)
    assert "rank 1 ended with status -9" in str(caught.value)
    with started(tmp_path, order) as ranks:
        ranks.wait(60, doomed=[1])
    with started(tmp_path, order) as ranks, pytest.raises(RanksError, match="rank 1 ended"):
        ranks.wait(60, doomed=[0])


if __name__ == "__main__":
    rank_main()
