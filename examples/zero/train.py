"""A sharded embedding table, as in ZeRO-2, with `reduce_scatter` and `all_gather_rows`.

    torchrun --nproc-per-node 4 examples/zero/train.py --layout columns
    python examples/zero/train.py --dense 4        # one process, the whole table, same losses

Each rank keeps its shard of the table and of the optimiser's state. A step fetches the rows that
this rank's batch touches, and sends each owner its part of the gradient's non-zero rows. The dense
run adds the gradients of the same batches in order, so that its losses have the same bits.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import zensync
from torch import nn
from torch.nn import functional


def make_table(args: argparse.Namespace) -> torch.Tensor:
    """The whole table at the start, the same on all ranks."""
    return torch.randn(args.rows, args.columns, generator=torch.Generator().manual_seed(1)) * 0.1


def make_head(args: argparse.Namespace) -> nn.Linear:
    """What lies behind the table: small, so every rank has all of it."""
    torch.manual_seed(2)
    return nn.Linear(args.columns, args.classes)


def batch_of(args: argparse.Namespace, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [batch, words], classes [batch]); ids by frequency: low ones are common, as in texts."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    uniform = torch.rand(args.batch, args.words, generator=generator)
    ids = (args.rows**uniform - 1).long().clamp_(0, args.rows - 1)
    return ids, ids[:, 0] % args.classes


def loss_of(
    table: torch.Tensor, ids: torch.Tensor, head: nn.Linear, classes: torch.Tensor
) -> torch.Tensor:
    """The mean loss of one batch; `ids` are rows of `table`."""
    return functional.cross_entropy(head(functional.embedding(ids, table).mean(dim=1)), classes)


class ShardedTable:
    """This rank's part of the table, and the gradient and rows that travel."""

    def __init__(self, args: argparse.Namespace, state: zensync.State) -> None:
        self.args, self.state = args, state
        whole = make_table(args)
        parts = whole.chunk(state.size, dim=0 if args.layout == "rows" else 1)
        part = parts[state.rank] if state.rank < len(parts) else whole[:0]
        self.shard = nn.Parameter(part.contiguous())  # a copy where it is not the whole of `whole`
        self.gradient = torch.zeros_like(whole)  # of this rank's batch; mostly zeros

    def fetch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows that `ids` touch, as a leaf; the ids as places in them; their distinct ids)."""
        distinct, places = ids.unique(return_inverse=True)
        rows = zensync.all_gather_rows(
            self.shard,
            distinct,
            layout=self.args.layout,
            total_rows=self.args.rows,
            name="table",
            state=self.state,
        )
        return rows.requires_grad_(), places, distinct

    def reduce(self, rows: torch.Tensor, distinct: torch.Tensor) -> None:
        """The mean gradient of this rank's shard, from the gradients of all ranks' rows."""
        assert rows.grad is not None
        self.gradient[distinct] = rows.grad
        if self.shard.grad is None:
            self.shard.grad = torch.empty_like(self.shard)
        zensync.reduce_scatter(
            self.shard.grad,
            self.gradient,
            dist.ReduceOp.AVG,
            layout=self.args.layout,
            name="table's gradient",
            state=self.state,
        )
        self.gradient[distinct] = 0.0


def train_sharded(args: argparse.Namespace) -> None:
    """One rank of many."""
    dist.init_process_group("gloo")
    with zensync.State(scheme="balanced") as state:
        table, head = ShardedTable(args, state), make_head(args)
        optimiser = torch.optim.Adagrad([table.shard, *head.parameters()], lr=args.rate)
        sent_before = 0
        for step in range(args.steps):
            optimiser.zero_grad(set_to_none=False)
            ids, classes = batch_of(args, step, state.rank)
            rows, places, distinct = table.fetch(ids)
            loss = loss_of(rows, places, head, classes)
            loss.backward()
            table.reduce(rows, distinct)
            mean = loss.detach()
            for tensor in (mean, *(parameter.grad for parameter in head.parameters())):
                zensync.all_reduce(tensor, dist.ReduceOp.AVG, state=state)
            optimiser.step()
            sent = state.stats()["sent_bytes"]
            if state.rank == 0:
                print(f"step {step} loss {mean.item():.9g} sent {sent - sent_before} B", flush=True)
            sent_before = sent
        if state.rank == 0:
            report(args, state)
    dist.destroy_process_group()


def report(args: argparse.Namespace, state: zensync.State) -> None:
    """What the last step moved, beside what a dense ZeRO-2 step sends for the table."""
    dense = 2 * 4 * args.rows * args.columns * (state.size - 1) // state.size
    tensors = state.stats()["tensors"]
    for name in ("table", "table's gradient"):
        if name in tensors:
            one = tensors[name]
            print(f"{name}: {one['sent_bytes']} B sent, imbalance {one['imbalance']:.2f}")
    print(f"the whole table both ways, as without zensync: {dense} B")


def train_dense(args: argparse.Namespace) -> None:
    """One process in place of `args.dense` ranks, with the whole table."""
    table, head = nn.Parameter(make_table(args)), make_head(args)
    optimiser = torch.optim.Adagrad([table, *head.parameters()], lr=args.rate)
    for step in range(args.steps):
        optimiser.zero_grad()
        total = torch.zeros(())
        for rank in range(args.dense):
            ids, classes = batch_of(args, step, rank)
            loss = loss_of(table, ids, head, classes)
            loss.backward()
            total += loss.detach()
        for parameter in (table, *head.parameters()):
            assert parameter.grad is not None
            parameter.grad /= args.dense
        optimiser.step()
        print(f"step {step} loss {(total / args.dense).item():.9g}", flush=True)


def main(words: list[str] | None = None) -> None:
    """Reads the options (those of the command line if None) and trains."""
    parser = argparse.ArgumentParser(description="A sharded embedding table with zensync.")
    parser.add_argument("--layout", choices=("rows", "columns"), default="columns")
    parser.add_argument("--dense", type=int, default=0, help="one process in place of N ranks")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--words", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.1)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    if args.dense:
        train_dense(args)
    else:
        train_sharded(args)


if __name__ == "__main__":
    main()
