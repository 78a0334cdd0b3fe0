"""`zensync bench --exchange`: a small exchange on the native mesh, ranks are processes.

Each rank sends 20 kB to each peer. "busy": the main thread of every rank runs Python all the time
while another thread exchanges, as in a training step whose hooks wait for the interpreter.
"""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from .. import _core
from ..errors import raise_error
from ..lab.processes import Ranks, leaving_on_signals, taken_order
from ..lab.stats import median_interval
from .result import Row, Table

_MESSAGE_BYTES = 20_000
_TIMEOUT_S = 120
_CASES = ((2, False, None), (2, True, 0.3), (4, False, None), (4, True, None), (8, False, 1.0))


@dataclass(frozen=True)
class _Order:
    ranks: int
    busy: bool
    iterations: int
    folder: str

    def result(self, rank: int) -> Path:
        return Path(self.folder, f"rank{rank}.json")


def run() -> list[Table]:
    """Milliseconds of one exchange, slowest rank, over ranks × idle/busy."""
    return [
        Table(
            "small exchange, native mesh, loopback, 20 kB to each peer", [_case(*c) for c in _CASES]
        )
    ]


def _case(ranks: int, busy: bool, target_ms: float | None) -> Row:
    with leaving_on_signals(), tempfile.TemporaryDirectory(prefix="zensync-bench-") as folder:
        order = _Order(ranks, busy, 300 if busy else 1000, folder)
        with Ranks(ranks, Path(folder), None) as started:
            started.start("zensync.bench.exchange", order)
            started.wait(_TIMEOUT_S)
        times = [json.loads(order.result(rank).read_text()) for rank in range(ranks)]
    slowest = [max(at) * 1e3 for at in zip(*times, strict=True)]
    ordered = sorted(slowest)
    value = median_interval(slowest)
    return {
        "ranks": ranks,
        "main threads": "busy in Python" if busy else "idle",
        "median_ms": value.median,
        "median_ms_low": value.low,
        "median_ms_high": value.high,
        "p90_ms": ordered[len(ordered) * 9 // 10],
        "target": "–" if target_ms is None else f"≤ {target_ms} ms",
        "met": None if target_ms is None else value.median <= target_ms,
    }


def rank_main() -> None:
    """One rank, as the command line says. Writes the seconds of each exchange as JSON."""
    order, rank = taken_order(_Order)
    meeting = str(Path(order.folder, "meeting"))
    result: list[object] = []

    def exchange() -> None:
        result.append(
            _core.time_exchange(meeting, rank, order.ranks, _MESSAGE_BYTES, order.iterations)
        )

    worker = threading.Thread(target=exchange)
    worker.start()
    spins = 0
    while order.busy and worker.is_alive():
        spins += sum(i * i for i in range(100))
    worker.join()
    seconds = result[0]
    if isinstance(seconds, _core.ErrorInfo):
        raise_error(seconds)
    order.result(rank).write_text(json.dumps(seconds))


if __name__ == "__main__":
    rank_main()
