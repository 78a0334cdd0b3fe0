"""`zensync.attach` on plain modules, against a dense DDP of the same model.

Gradients are small whole numbers, so that all bits must agree.
"""

import dataclasses
import logging

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, same_bits
from torch.nn.parallel import DistributedDataParallel
from zensync._attach import _attached

ROWS, COLUMNS = 8192, 16  # 512 KiB
STEPS = 4


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    note: str = "not a tensor"


KINDS = {
    "tensor": lambda loss: loss,
    "tuple": lambda loss: ("text", [loss]),
    "dict": lambda loss: {"loss": loss},
    "dataclass": Output,
}


def loss_in(output):
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return output[1][0]
    return output["loss"] if isinstance(output, dict) else output.loss


class Model(torch.nn.Module):
    """A table, a functional and a sometimes unused one, one that nobody uses, dense layers; `tied`
    uses the first table as the output layer too."""

    def __init__(self, sparse, kind="tensor", tied=False):
        super().__init__()
        self.first = torch.nn.Linear(COLUMNS, COLUMNS)
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.some = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.never = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.functional = torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
        self.wide = torch.nn.Linear(COLUMNS, ROWS, bias=False)  # dense, in place
        self.last = torch.nn.Linear(COLUMNS, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.sparse, self.kind = sparse, kind
        if tied:
            self.wide.weight = self.table.weight

    def forward(self, ids, use_some=True):
        rows = self.table(ids)
        if use_some:
            rows = rows + self.some(ids)
        rows = rows + torch.nn.functional.embedding(ids, self.functional, sparse=self.sparse)
        loss = self.last(self.first(rows)).sum() + 0.5 * self.wide(rows).sum()
        return KINDS[self.kind](loss)


def make_model(seed, *args, **kwargs):
    model = Model(*args, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator).float())
        model.seen.fill_(seed)
    return model


def ids_of(rank, step, count=64):
    generator = torch.Generator().manual_seed(77 * step + rank)
    return torch.randint(0, ROWS, (count,), generator=generator)


def uses(rank, step):
    """Whether a rank uses the table that some do not use."""
    return step > 0 and (rank == 1 or step == 3)


def gradients_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.layout == torch.sparse_coo:
            assert gradient.is_coalesced(), name
            gradient = gradient.to_dense()
        found[name] = None if gradient is None else gradient.clone()
    return found


def train(model, run, steps=STEPS):
    """Gradients of every step, as dense copies; weights move by whole numbers."""
    rank, history = dist.get_rank(), []
    for step in range(steps):
        model.zero_grad()
        loss_in(run(ids_of(rank, step), uses(rank, step))).backward()
        history.append(gradients_of(model))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(torch.sign(parameter.grad.to_dense()))
    return history


def stock(tied):
    """What DDP makes of it, dense, from rank 0's weights."""
    model = make_model(1, False, tied=tied)
    return train(model, DistributedDataParallel(model, find_unused_parameters=True))


def compare(ours, theirs, what):
    for step, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        for name, gradient in wanted.items():
            where = f"{what}: step {step}, {name}"
            if gradient is None:
                assert mine[name] is None, where
                continue
            assert mine[name] is not None, where
            assert torch.equal(mine[name], gradient), where
            assert same_bits(mine[name]), where


def body_equals_ddp(rank, size):
    for tied in (False, True):
        wanted = stock(tied)
        assert wanted[0]["some.weight"] is None, "the control: nobody uses it in the first step"
        assert wanted[3]["some.weight"] is not None
        for sparse in (False, True):
            for kind in KINDS if not tied else ("tensor",):
                what = f"sparse={sparse} {kind} tied={tied}"
                model = make_model(1 + rank, sparse, kind, tied)  # other weights on each rank
                state = zensync.attach(model)
                assert model.seen.tolist() == [1.0] * 3, "rank 0's buffers"
                compare(train(model, model), wanted, what)
                done = [k for k, v in state.stats()["tensors"].items() if v["outcome"] == "done"]
                assert size == 1 or ("table.weight" in done) != tied, (what, done)
                assert state.last_error is None
                state.close()


@pytest.mark.parametrize("size", [1, 4])  # means of whole numbers stay exact
def test_equals_ddp(size):
    run_ranks(size, body_equals_ddp)


def body_before_ddp(rank, size):
    wanted = stock(False)
    for sparse in (False, True):
        for options in (
            {"find_unused_parameters": True},
            {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        ):
            model = make_model(1 + rank, sparse)
            state = zensync.attach(model, parameters="tables")
            ddp = DistributedDataParallel(model, **options)
            compare(train(model, ddp), wanted, f"sparse={sparse} {options}")
            assert "table.weight" in state.stats()["tensors"]
            taken = {name for name, _ in _attached[model].named}
            assert "first.weight" not in taken, "that one is left to DDP"
            state.close()


def test_tables_in_front_of_ddp():
    run_ranks(2, body_before_ddp)


def body_nobody_knows(rank, size):
    """Rank 0's backward reaches no parameter that was taken over: its outputs are enough."""
    for sparse in (False, True):
        table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        torch.nn.init.ones_(table.weight)

        class Some(torch.nn.Module):
            def __init__(self, table):
                super().__init__()
                self.table = table

            def forward(self, rows, ids):
                return rows if ids is None else rows + self.table(ids)

        model = Some(table)
        state = zensync.attach(model)
        for step in range(3):
            rows = torch.ones(4, COLUMNS, requires_grad=True)
            ids = torch.arange(4) if rank == 1 else None
            model.zero_grad()
            model(rows, ids).sum().backward()
            gradient = table.weight.grad.to_dense()
            assert gradient[:4].eq(1 / size).all(), (step, gradient[:5])
            assert not gradient[4:].any()
            assert (table.weight.grad.layout == torch.sparse_coo) == sparse
        state.close()


def test_a_rank_without_gradients_takes_part():
    run_ranks(2, body_nobody_knows)


def body_mixed(rank, size):
    """COO on one rank, dense-stored on the other: dense-stored on both."""
    weight = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, ids, sparse):
            return torch.nn.functional.embedding(ids, self.weight, sparse=sparse)

    model = Mixed()
    state = zensync.attach(model)
    layouts = [(True, True), (True, False), (True, True), (False, False), (True, True)]
    for step, both in enumerate(layouts):
        model.zero_grad()
        model(ids_of(rank, step), both[rank]).sum().backward()
        wanted = torch.zeros(ROWS, COLUMNS)
        for other in range(size):
            ids = ids_of(other, step)
            wanted.index_add_(0, ids, torch.full((len(ids), COLUMNS), 1 / size))
        assert torch.equal(weight.grad.to_dense(), wanted), step
        assert (weight.grad.layout == torch.sparse_coo) == all(both), step
    state.close()


def test_layouts_that_differ():
    run_ranks(2, body_mixed)


def body_ddp(rank, size):
    texts = []

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    logging.getLogger("zensync").addHandler(Keep())
    for sparse, unused in ((False, False), (True, False), (True, True)):
        model = torch.nn.Sequential(torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse))
        ddp = DistributedDataParallel(model, find_unused_parameters=unused)
        state = zensync.attach(ddp)
        texts.clear() if not unused else None
        with state.no_sync():
            ddp(ids_of(rank, 0)).sum().backward()
        assert not same_bits(model[0].weight.grad.to_dense())
        ddp(ids_of(rank, 1)).sum().backward()
        assert same_bits(model[0].weight.grad.to_dense())
        with pytest.raises(zensync.Error, match="takes no hook"):
            zensync.attach(ddp)
        with pytest.raises(zensync.Error, match="plain module"):
            zensync.attach(ddp, parameters="tables")
        state.close()
        assert any("before" in text for text in texts) == unused, texts


def test_on_a_ddp():
    run_ranks(2, body_ddp)
