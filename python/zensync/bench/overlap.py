"""`zensync bench --overlap`: how much of a synchronisation hides behind backward.

Four ranks, each on a host of its own (slow-link network of 200 Mbit/s as root, else loopback),
train a stand-in whose backward sleeps for each layer, from the top down. `layers`: 16 of them with
equal dense-stored gradients [16384, 64] fp32, one row in fifty; `table`: the same gradients in one
table at the bottom, whose gradient comes last. Each iteration takes three steps in turn: without
synchronising (`State.no_sync`), without sleeping, and both; times are those of the slowest rank.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..lab.processes import Ranks, leaving_on_signals, taken_order
from ..lab.slow_net import LinkSpec, SlowNet, why_not
from ..lab.stats import median_interval, paired_ratio
from .result import Row, Table

_RANKS, _RATE = 4, "200mbit"
_LAYERS, _ROWS, _COLUMNS, _EVERY = 16, 16384, 64, 50
_WARMUP, _ITERATIONS = 3, 11
_TIMEOUT_S = 300
_TARGET = 1.10
_CASES = (("layers", 1.0), ("layers", 2.0), ("table", 1.0))


@dataclass(frozen=True)
class _Order:
    folder: str


def run() -> list[Table]:
    """Milliseconds of a step against the larger of computing and synchronising."""
    with ExitStack() as stack:
        stack.enter_context(leaving_on_signals())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zensync-bench-"))
        net = None
        if why_not() is None:
            net = stack.enter_context(SlowNet(_RANKS, LinkSpec(rate=_RATE), label="overlap"))
        ranks = stack.enter_context(Ranks(_RANKS, Path(folder), net))
        ranks.start("zensync.bench.overlap", _Order(folder))
        ranks.wait(_TIMEOUT_S)
        ends = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    where = f"{_RATE} a rank" if net else "loopback"
    title = f"step against max(compute, synchronisation), {_RANKS} ranks, {where}"
    return [Table(title, [_row(at, ends, net is not None) for at in range(len(_CASES))])]


def _row(at: int, ends: list[Any], on_links: bool) -> Row:
    kind, share = _CASES[at]
    modes = {
        mode: [max(times) for times in zip(*(end[at][mode] for end in ends), strict=True)]
        for mode in ("compute", "sync", "both")
    }
    longest = [max(pair) for pair in zip(modes["compute"], modes["sync"], strict=True)]
    ratio = paired_ratio(modes["both"], longest)
    exposed = [
        both - compute for both, compute in zip(modes["both"], modes["compute"], strict=True)
    ]
    is_judged = kind == "layers" and on_links
    return {
        "case": kind,
        "compute / sync": share,
        **{f"{mode}_ms": median_interval(times).median * 1e3 for mode, times in modes.items()},
        "exposed_ms": median_interval(exposed).median * 1e3,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "target": f"≤ {_TARGET}" if is_judged else "–",
        "met": ratio.median <= _TARGET if is_judged else None,
    }


def rank_main() -> None:
    """One rank, as the command line says. Writes seconds by case and mode as JSON."""
    order, rank = taken_order(_Order)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=_RANKS)
    ends = [_measure(kind, share, rank) for kind, share in _CASES]
    Path(order.folder, f"rank{rank}.json").write_text(json.dumps(ends))
    dist.barrier()
    dist.destroy_process_group()


def _measure(kind: str, share: float, rank: int) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    import zensync

    model = _stand_in(kind, rank)
    state = zensync.attach(model)

    def step(sleep_s: float) -> float:
        model.zero_grad(set_to_none=True)
        model.sleep_s = sleep_s
        dist.barrier()
        begin = time.monotonic()
        model(torch.ones(1, requires_grad=True)).backward()
        return time.monotonic() - begin

    alone = [step(0.0) for _ in range(_WARMUP + 5)][_WARMUP:]
    longest = torch.tensor([sorted(alone)[2]])
    dist.all_reduce(longest, dist.ReduceOp.MAX)  # all ranks sleep alike
    sleep_s = float(longest) * share / _LAYERS
    times: dict[str, list[float]] = {"compute": [], "sync": [], "both": []}
    for _ in range(_ITERATIONS):
        with state.no_sync():
            times["compute"].append(step(sleep_s))
        times["sync"].append(step(0.0))
        times["both"].append(step(sleep_s))
    state.close()
    return times


def _stand_in(kind: str, rank: int) -> Any:
    """A chain of layers; a layer's backward sleeps and gives its weight's gradient."""
    import torch

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, weight: Any, owner: Any) -> Any:
            ctx.owner, ctx.has_weight = owner, weight is not None
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if ctx.owner.sleep_s:
                time.sleep(ctx.owner.sleep_s)
            return gradients[0], ctx.owner.gradient.clone() if ctx.has_weight else None, None

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sleep_s = 0.0
            count, rows = (_LAYERS, _ROWS) if kind == "layers" else (1, _ROWS * _LAYERS)
            self.tables = torch.nn.ModuleList(
                torch.nn.Embedding(rows, _COLUMNS) for _ in range(count)
            )
            self.gradient = torch.zeros(rows, _COLUMNS)
            self.gradient[rank * 7 :: _EVERY] = 1.0

        def forward(self, value: Any) -> Any:
            for at in range(_LAYERS):
                table: Any = self.tables[at] if at < len(self.tables) else None
                value = Layer.apply(value, None if table is None else table.weight, self)
            return value.sum()

    return Chain()


if __name__ == "__main__":
    rank_main()
