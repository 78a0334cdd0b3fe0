"""Support matrix: what torch itself cannot do, shown without zensync, beside what to use instead.

When one of these fails, torch was mended, and its row of the matrix can go.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from matrix_ways import COLUMNS, ROWS, Model, batch, dense, make_model, reference_step
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel


class Functional(torch.nn.Module):
    """A sparse table that DDP does not know of."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.weight, sparse=True).sum()


class Tied(torch.nn.Module):
    """A sparse table that is the output layer too."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
        self.out = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(self.table(ids)).sum()


class Unused(Model):
    def forward(self, ids):
        return super().forward(ids, use_some=False)


FAILING = {
    "unused": lambda: DistributedDataParallel(Unused(True), find_unused_parameters=True),
    "functional": lambda: DistributedDataParallel(Functional()),
    "tied": lambda: DistributedDataParallel(Tied()),
}
MADE_RIGHT = {"unused": lambda: Unused(True), "functional": Functional, "tied": Tied}


def said_by(name, with_hook):
    """What backward says; "" if it succeeds."""
    ddp = FAILING[name]()
    state = zensync.attach(ddp) if with_hook else None
    try:
        for step in range(2):
            ddp(*batch(0, step)).backward()
    except RuntimeError as why:
        return str(why) or "no words"
    finally:
        if state is not None:
            state.close()
    return ""


def body_fails(rank, size):
    return {(name, hook): said_by(name, hook) for name in FAILING for hook in (False, True)}


@pytest.fixture(scope="module")
def said():
    return run_ranks(1, body_fails, exit_codes=False, destroy=False)[0]


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("name", FAILING)
def test_ddp_fails_on_such_tables(name, with_hook, said):
    """With and without the hook: it is called too late to help."""
    words = said[name, with_hook]
    assert words, "torch has mended it"
    if name == "unused":
        assert "Expected sparse gradient to be defined" in words


def body_cured(rank, size):
    for make in MADE_RIGHT.values():
        model = make()
        with zensync.attach(model, parameters="tables"):
            left = [one for one in model.parameters() if one.shape != (ROWS, COLUMNS)]
            run = DistributedDataParallel(model, find_unused_parameters=True) if left else model
            for step in range(2):
                model.zero_grad()
                run(*batch(rank, step)).backward()


def test_attached_tables_do_not_fail():
    run_ranks(2, body_cured)


def body_shared(rank, size):
    stock, wanted = make_model(True), make_model()
    ddp = DistributedDataParallel(stock)
    ddp(*batch(rank, 0)).backward()
    means = reference_step(wanted, [batch(other, 0) for other in range(size)])
    return {
        name: torch.equal(dense(one.grad), means[name]) for name, one in stock.named_parameters()
    }


def test_ddp_halves_sparse_gradients_that_share_memory():
    """Two sparse=True tables whose rows are added have one gradient in memory; DDP divides it once
    for each. zensync by all ways: `test_matrix_options.py`, which compares with one process."""
    for right in run_ranks(2, body_shared):
        tables = right.pop("table.weight"), right.pop("some.weight")  # now and then both are wrong
        assert not all(tables), "torch has mended it"
        assert all(right.values())


def test_clipping_by_value_of_torch_fails_on_coo():
    table = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    table(torch.tensor([3, 3])).sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.nn.utils.clip_grad_value_(table.parameters(), 0.5)
    assert zensync.clip_grad_norm_(table.parameters(), 0.5) > 0.5


REFUSING = {
    "Adam": lambda p: torch.optim.Adam(p),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "weight decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", REFUSING)
def test_optimisers_that_take_no_coo_gradients(name):
    table = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    table(torch.tensor([3])).sum().backward()
    with pytest.raises(RuntimeError):
        REFUSING[name](table.parameters()).step()


def body_half(rank, size):
    with pytest.raises(RuntimeError, match="Half"):
        dist.all_reduce(torch.ones(4, 2).half().to_sparse(1))


def test_gloo_adds_no_fp16_coo_tensors():
    """zensync does (`test_all_reduce.py`)."""
    run_ranks(2, body_half, exit_codes=False, destroy=False)
