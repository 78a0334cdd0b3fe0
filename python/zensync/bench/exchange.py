"""`zensync bench --exchange`: a small exchange on the native mesh, ranks are processes.

Each rank sends 20 kB to each peer. "busy": the main thread of every rank runs Python all the time
while another thread exchanges, as in a training step whose hooks wait for the interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading

from .. import _core
from ..errors import raise_error
from ..lab.stats import median_interval
from .result import Row, Table

_MESSAGE_BYTES = 20_000
_TIMEOUT_S = 120
_CASES = ((2, False, None), (2, True, 0.3), (4, False, None), (4, True, None), (8, False, 1.0))


def run() -> list[Table]:
    """Milliseconds of one exchange, slowest rank, over ranks × idle/busy."""
    return [
        Table(
            "small exchange, native mesh, loopback, 20 kB to each peer", [_case(*c) for c in _CASES]
        )
    ]


def _case(ranks: int, busy: bool, target_ms: float | None) -> Row:
    iterations = 300 if busy else 1000
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(ranks), str(int(busy)), str(iterations), folder]
        code = "from zensync.bench.exchange import rank_main; rank_main()"
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), *arguments],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            outputs = [child.communicate(timeout=_TIMEOUT_S)[0] for child in children]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
    times = [json.loads(output) for output in outputs]
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
    """One rank; its arguments stand in sys.argv. Prints the seconds of each exchange as JSON."""
    rank, ranks, busy, iterations = (int(text) for text in sys.argv[1:5])
    folder = sys.argv[5]
    result: list[object] = []

    def exchange() -> None:
        result.append(_core.time_exchange(folder, rank, ranks, _MESSAGE_BYTES, iterations))

    worker = threading.Thread(target=exchange)
    worker.start()
    spins = 0
    while busy and worker.is_alive():
        spins += sum(i * i for i in range(100))
    worker.join()
    seconds = result[0]
    if isinstance(seconds, _core.ErrorInfo):
        raise_error(seconds)
    print(json.dumps(seconds))
