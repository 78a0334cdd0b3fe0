"""`zensync bench --failures`: how soon all ranks know that they disagree, or that one was killed.

Three processes on loopback, once per transport. First rank 1 hands over another shape than the
others; then, in a State made anew, it kills itself between two sums. Seconds are those of the
slowest rank, from the instant at which all had come (mismatch) or just before the kill, on the
monotonic clock that processes of a machine share. `same`: 1 if all had an error of one class with
one culprit, which is rank 1 where that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..lab.processes import Ranks, leaving_on_signals, taken_order
from .result import Row, Table

_RANKS = 3
_CULPRIT = 1
_TIMEOUT_S = 120
_STEPS_BEFORE = 10
_KILLED = "kill -9"


@dataclass(frozen=True)
class _Order:
    folder: str


def run() -> list[Table]:
    """Seconds until all ranks know, over fault × transport."""
    title = "seconds until all ranks name the culprit, 3 ranks, loopback"
    return [Table(title, [row for transport in ("native", "torch") for row in _rows(transport)])]


def _rows(transport: str) -> list[Row]:
    with leaving_on_signals(), tempfile.TemporaryDirectory(prefix="zensync-bench-") as folder:
        with Ranks(_RANKS, Path(folder), None) as ranks:
            variables = {"ZENSYNC_TRANSPORT": transport}
            ranks.start("zensync.bench.failures", _Order(folder), variables)
            ranks.wait(_TIMEOUT_S, doomed=[_CULPRIT])
        ends = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
        killed_at = float((Path(folder) / "killed").read_text())
    survivors = [end for end in ends if end["rank"] != _CULPRIT]
    came = max(end["came"] for end in ends)
    return [
        _row("another shape on one rank", transport, [end["mismatch"] for end in ends], came, 2.0),
        _row(_KILLED, transport, [end["lost"] for end in survivors], killed_at, 10.0),
    ]


def _row(
    fault: str, transport: str, ends: list[dict[str, Any]], since: float, target: float
) -> Row:
    seconds = max(end["at"] for end in ends) - since
    named = {(end["kind"], end["culprit"]) for end in ends}
    is_known = all(culprit is not None for _, culprit in named)
    same = len(named) == 1 and is_known
    if fault == _KILLED:
        same = named == {("PeerLostError", _CULPRIT)}
    return {
        "fault": fault,
        "transport": transport,
        "seconds": seconds,
        "error": " ".join(sorted(kind for kind, _ in named)),
        "same": int(same),
        "target": f"≤ {target:g}",
        "met": same and seconds <= target,
    }


def rank_main() -> None:
    """One rank, as the command line says."""
    order, rank = taken_order(_Order)
    import torch
    import torch.distributed as dist

    import zensync

    folder = Path(order.folder)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS
    )

    def caught(columns: int, steps: int) -> dict[str, Any]:
        state = zensync.State()
        dist.barrier()
        end["came"] = end.get("came") or time.monotonic()
        try:
            for _ in range(steps):
                zensync.all_reduce(torch.ones(500, columns), name="table", state=state)
            if rank == _CULPRIT:
                (folder / "killed").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            zensync.all_reduce(torch.ones(500, columns), name="table", state=state)
        except zensync.Error as why:
            at, kind, culprit = time.monotonic(), type(why).__name__, why.culprit
            state.close()
            return {"at": at, "kind": kind, "culprit": culprit}
        raise SystemExit(f"rank {rank}: no error came")

    end: dict[str, Any] = {"rank": rank}
    path = folder / f"rank{rank}.json"
    end["mismatch"] = caught(8 if rank == _CULPRIT else 4, 1)
    path.write_text(json.dumps(end))  # of the rank that dies, too
    end["lost"] = caught(4, _STEPS_BEFORE)
    path.write_text(json.dumps(end))
    # The group has lost a rank: nothing of it is waited for.


if __name__ == "__main__":
    rank_main()
