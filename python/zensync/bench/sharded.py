"""`zensync bench --sharded`: FSDP2's gradient reduce-scatter of a table, stock and by `attach`.

Four processes on loopback train on real text, 8192 tokens a rank and step: a table of a language
model's vocabulary (151 936 × 64 fp32, not tied) in the root unit, a block of its own, a head that
tells which of 512 classes the next token is in. The same steps are run with torch's own
reduce-scatter, whose bytes are the least that a dense one moves ((n − 1)/n of the table), and after
`zensync.attach`, whose bytes are those it counted: the busiest rank's, mean over steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..lab.processes import Ranks, leaving_on_signals, taken_order
from .result import Row, Table

_RANKS = 4
_ROWS, _COLUMNS, _CLASSES = 151_936, 64, 512
_TOKENS, _STEPS = 8192, 12
_TIMEOUT_S = 300
_TARGET, _BALANCED = 60.0, 1.01
WAYS = ("columns", "rows")


@dataclass(frozen=True)
class _Order:
    folder: str
    tokens_file: str


def run(data: str | None, offline: bool) -> list[Table]:
    """Bytes, balance and losses, over ways to cut the table."""
    from ..demo.data import data_folder, prepare

    corpus = prepare(
        data_folder(data), offline=offline, say=lambda text: print(text, file=sys.stderr)
    )
    with leaving_on_signals(), tempfile.TemporaryDirectory(prefix="zensync-bench-") as folder:
        with Ranks(_RANKS, Path(folder), None) as ranks:
            ranks.start("zensync.bench.sharded", _Order(folder, corpus.tokens_file))
            ranks.wait(_TIMEOUT_S)
        ends = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    title = f"gradient of a table [{_ROWS}, {_COLUMNS}], FSDP2, {_RANKS} ranks, {_TOKENS} tokens"
    return [Table(title, [_row(way, ends, corpus.source) for way in WAYS])]


def _row(way: str, ends: list[dict[str, Any]], text: str) -> Row:
    stock_bytes = (_RANKS - 1) / _RANKS * _ROWS * _COLUMNS * 4
    by_step = [max(sizes) for sizes in zip(*(end[way]["bytes"] for end in ends), strict=True)]
    own_bytes = sum(by_step) / len(by_step)
    density = sum(sum(end[way]["units"]) for end in ends) / len(by_step) / _RANKS / _ROWS
    imbalance = max(end[way]["imbalance"] for end in ends)
    pairs = [
        pair for end in ends for pair in zip(end[way]["stock"], end[way]["losses"], strict=True)
    ]
    difference = max(abs(ours - stock) / abs(stock) for stock, ours in pairs)
    row: Row = {
        "shards": way,
        "stock_bytes": round(stock_bytes),
        "zensync_bytes": round(own_bytes),
        "ratio": stock_bytes / own_bytes,
        "ratio_worst_step": stock_bytes / max(by_step),
        "density": density / (_RANKS if way == "columns" else 1),
        "imbalance": imbalance,
        "loss_difference": difference,
        "steps": _STEPS,
        "text": text,
    }
    if way == "columns":
        row["target"] = f"≥ {_TARGET:g}×, imbalance ≤ {_BALANCED}"
        row["met"] = row["ratio"] >= _TARGET and imbalance <= _BALANCED and difference < 1e-6
    return row


def rank_main() -> None:
    """One rank, as the command line says."""
    order, rank = taken_order(_Order)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{order.folder}/store", rank=rank, world_size=_RANKS
    )
    end = {way: _train(way, order.tokens_file, rank) for way in WAYS}
    Path(order.folder, f"rank{rank}.json").write_text(json.dumps(end))
    dist.destroy_process_group()


def _train(way: str, tokens_file: str, rank: int) -> dict[str, Any]:
    """Losses with torch's own reduce-scatter and ours; bytes and balance of ours."""
    import zensync

    model, optimiser = _sharded(way)
    stock = [_step(model, optimiser, tokens_file, (rank, step)) for step in range(_STEPS)]
    model, optimiser = _sharded(way)
    state = zensync.attach(model)
    losses, sizes, units, imbalances = [], [], [], []
    for step in range(_STEPS):
        losses.append(_step(model, optimiser, tokens_file, (rank, step)))
        report = state.stats()["tensors"]["table.weight"]
        sizes.append(max(report["sent_bytes"], report["received_bytes"]))
        units.append(report["units"])
        imbalances.append(report["imbalance"])
    state.close()
    return {
        "stock": stock,
        "losses": losses,
        "bytes": sizes,
        "units": units,
        "imbalance": max(imbalances),
    }


def _sharded(way: str) -> tuple[Any, Any]:
    """The model, cut over all ranks, and its optimiser."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import zensync

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential()
    model.add_module("table", torch.nn.Embedding(_ROWS, _COLUMNS))
    model.add_module("block", torch.nn.Linear(_COLUMNS, 4 * _COLUMNS))
    model.add_module("bend", torch.nn.GELU())
    model.add_module("head", torch.nn.Linear(4 * _COLUMNS, _CLASSES))
    mesh = init_device_mesh("cpu", (_RANKS,))
    fully_shard(model.block, mesh=mesh)
    placement = zensync.by_columns if way == "columns" else None
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def _step(model: Any, optimiser: Any, tokens_file: str, place: tuple[int, int]) -> float:
    """One step on the tokens that (rank, step) has; its loss."""
    import numpy as np
    import torch

    tokens = np.load(tokens_file, mmap_mode="r")
    rank, step = place
    begin = (tokens.size // _RANKS * rank + step * _TOKENS) % (tokens.size - _TOKENS - 1)
    ids = torch.from_numpy(tokens[begin : begin + _TOKENS + 1].astype(np.int64)) % _ROWS
    optimiser.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:] % _CLASSES)
    loss.backward()
    optimiser.step()
    return float(loss.detach())


if __name__ == "__main__":
    rank_main()
