"""Training with `zensync.attach`: optimisers, accumulation, compilers, parameters that come and go.

Compared with one process that sees the batches of all ranks; whole numbers where bits must agree.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, same_bits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROWS, COLUMNS = 4096, 8


class Model(torch.nn.Module):
    """A table, a layer below it in order, and one that may be checkpointed."""

    def __init__(self, sparse, checkpointed=None):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.layer = torch.nn.Linear(COLUMNS, COLUMNS)
        self.last = torch.nn.Linear(COLUMNS, 1)
        self.reentrant = checkpointed

    def forward(self, ids):
        rows = self.table(ids)
        if self.reentrant is not None:
            rows = checkpoint(self.layer, rows, use_reentrant=self.reentrant)
        else:
            rows = self.layer(rows)
        return self.last(rows).sum()


def make_model(sparse, whole=True, **options):
    torch.manual_seed(3)
    model = Model(sparse, **options)
    if whole:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape).float())
    return model


def ids_of(rank, step, count=32):
    generator = torch.Generator().manual_seed(77 * step + rank)
    return torch.randint(0, ROWS, (count,), generator=generator)


def require_same(model, what):
    for name, parameter in model.named_parameters():
        assert same_bits(parameter), f"{what}: {name}"


def gradients_of(model):
    return {name: one.grad.to_dense() for name, one in model.named_parameters()}


# ---- optimisers

OPTIMISERS = {
    "sgd": (True, lambda p: [torch.optim.SGD(p, 0.5)]),
    "adagrad": (True, lambda p: [torch.optim.Adagrad(p, 0.1)]),
    "sparse_adam": (
        True,
        lambda p: [torch.optim.SparseAdam(p[:1], 0.1), torch.optim.SGD(p[1:], 0.1)],
    ),
    "adam": (False, lambda p: [torch.optim.Adam(p, 0.1)]),
    "adamw_fused": (False, lambda p: [torch.optim.AdamW(p, 0.1, fused=True)]),
}


def body_optimisers(rank, size):
    for kind, (sparse, make) in OPTIMISERS.items():
        ours, alone = make_model(sparse, False), make_model(sparse, False)
        state = zensync.attach(ours)
        our_steps, their_steps = make([*ours.parameters()]), make([*alone.parameters()])
        for step in range(4):
            for one in (ours, alone):
                one.zero_grad()
            ours(ids_of(rank, step)).backward()
            (sum(alone(ids_of(other, step)) for other in range(size)) / size).backward()
            for one in [*our_steps, *their_steps]:
                one.step()
        require_same(ours, kind)
        for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), kind
        assert not torch.equal(ours.table.weight, make_model(sparse, False).table.weight)
        state.close()


def body_scaled(rank, size):
    """autocast and GradScaler; bf16 parameters."""
    model = make_model(False)
    state = zensync.attach(model)
    scaler, optimiser = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        optimiser.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids_of(rank, step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        zensync.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimiser)
        scaler.update()
        require_same(model, f"scaled, step {step}")
    state.close()
    for sparse in (False, True):
        half = make_model(sparse).bfloat16()
        state = zensync.attach(half)
        half(ids_of(rank, 0)).backward()
        assert all(same_bits(one.grad) for one in half.parameters()), sparse
        assert half.table.weight.grad.dtype == torch.bfloat16
        assert not torch.equal(half.table.weight.grad.to_dense(), torch.zeros(ROWS, COLUMNS))
        state.close()


def body_training(rank, size):
    body_optimisers(rank, size)
    body_scaled(rank, size)


def test_optimisers():
    run_ranks(2, body_training)


# ---- accumulation


def body_accumulates(rank, size):
    for sparse in (False, True):
        ours, theirs = make_model(sparse), make_model(False)
        state, ddp = zensync.attach(ours), DistributedDataParallel(theirs)
        for first in (0, 10):
            with state.no_sync(), ddp.no_sync():
                for step in range(3):
                    ours(ids_of(rank, first + step % 2)).backward()
                    ddp(ids_of(rank, first + step % 2)).backward()
            assert not same_bits(ours.table.weight.grad.to_dense()), "the control: not sent yet"
            if sparse and first == 0:
                rows = torch.cat([ids_of(rank, 0), ids_of(rank, 1)]).unique()
                assert ours.table.weight.grad._nnz() == len(rows), "coalesced as they come"
            # The second round is a second backward before zero_grad, after a synchronisation.
            ours(ids_of(rank, first + 5)).backward()
            ddp(ids_of(rank, first + 5)).backward()
            mine, wanted = gradients_of(ours), gradients_of(theirs)
            for name, gradient in wanted.items():
                assert torch.equal(mine[name], gradient), (sparse, first, name)
        state.close()


def body_unused_after_no_sync(rank, size):
    """What was added up is sent though the last backward has nothing for it."""
    tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, COLUMNS, sparse=True) for _ in range(2))
    tables.forward = lambda ids, which: tables[which](ids).sum()
    state = zensync.attach(tables)
    with state.no_sync():
        tables(ids_of(rank, 0), 0).backward()
    tables(ids_of(rank, 1), 1).backward()
    wanted = torch.zeros(ROWS, COLUMNS)
    for other in range(size):
        wanted.index_add_(0, ids_of(other, 0), torch.full((32, COLUMNS), 1 / size))
    assert torch.equal(tables[0].weight.grad.to_dense(), wanted)
    state.close()


def body_accumulation(rank, size):
    body_accumulates(rank, size)
    body_unused_after_no_sync(rank, size)


def test_accumulation():
    run_ranks(2, body_accumulation)


# ---- compilers, checkpoints, what DDP does with the rest


def check_steps(model, run, reference, what):
    rank = dist.get_rank()
    for step in range(3):
        model.zero_grad()
        run(ids_of(rank, step)).backward()
        wanted = copy.deepcopy(reference)
        wanted.zero_grad()
        size = dist.get_world_size()
        (sum(wanted(ids_of(other, step)) for other in range(size)) / size).backward()
        for name, gradient in gradients_of(model).items():
            assert torch.equal(gradient, gradients_of(wanted)[name]), (what, step, name)


def body_wrapped(rank, size):
    for sparse in (False, True):
        model = make_model(sparse, checkpointed=False)
        state = zensync.attach(model)
        check_steps(model, model, make_model(False), f"checkpoint, sparse={sparse}")
        state.close()
    for compile_first in (True, False):
        model = make_model(False)
        if compile_first:
            run = torch.compile(model, backend="aot_eager")
            state = zensync.attach(run)
        else:
            state = zensync.attach(model)
            run = torch.compile(model, backend="aot_eager")
        check_steps(model, run, make_model(False), f"compile, first={compile_first}")
        state.close()
    for options in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ):
        model = make_model(True)
        state = zensync.attach(model, parameters="tables")
        ddp = DistributedDataParallel(model, **options)
        check_steps(model, ddp, make_model(False), f"{options}")
        state.close()


def test_wrapped_modules():
    run_ranks(2, body_wrapped)


# ---- groups, several States, parameters that come and go


def body_groups(rank, size):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[rank % 2]
    first, second = make_model(True), make_model(False)
    states = [zensync.attach(first, group=own), zensync.attach(second, group=own)]
    for step in range(2):
        for model in (first, second):
            model.zero_grad()
        (first(ids_of(rank, step)) + second(ids_of(rank, step))).backward()
        wanted = torch.zeros(ROWS)
        for other in (rank % 2, rank % 2 + 2):
            wanted.index_add_(0, ids_of(other, step), torch.ones(32))
        for model in (first, second):
            touched = model.table.weight.grad.to_dense().any(dim=1)
            assert touched.any()
            assert not (touched & (wanted == 0)).any()
            assert same_bits(model.table.weight.grad.to_dense(), own)
        assert not same_bits(first.table.weight.grad.to_dense()), "the control: other groups"
    for state in states:
        state.close()


def test_groups_and_several_states():
    run_ranks(4, body_groups)


def body_come_and_go(rank, size):
    model = make_model(True)
    state = zensync.attach(model)

    def step(number):
        model.zero_grad()
        model(ids_of(rank, number)).backward()

    step(0)
    model.table.weight.requires_grad_(False)
    for number in (1, 2):
        step(number)
        assert model.table.weight.grad is None
        assert same_bits(model.layer.weight.grad)
    model.table.weight.requires_grad_(True)
    step(3)
    assert same_bits(model.table.weight.grad)
    model.layer = torch.nn.Sequential(model.layer, torch.nn.Linear(COLUMNS, COLUMNS, bias=False))
    torch.nn.init.ones_(model.layer[1].weight)
    for number in (4, 5):
        step(number)
        assert all(same_bits(one.grad) for one in model.parameters()), number
    model.last = torch.nn.Linear(COLUMNS, 1)  # with weights of its own on each rank
    torch.nn.init.constant_(model.last.weight, rank)
    with pytest.raises(zensync.MismatchError, match=r"last\.weight"):
        step(6)
    state.close()


def body_broken_off(rank, size):
    """An exception in a backward that all ranks survive."""
    for sparse in (False, True):
        model = make_model(sparse)
        state = zensync.attach(model)
        model(ids_of(rank, 0)).backward()
        rows = model.table(ids_of(rank, 1))

        def trip(_):
            raise ValueError("tripped")

        rows.register_hook(trip)
        model.zero_grad()
        with pytest.raises(ValueError, match="tripped"):
            (model.last(model.layer(rows)).sum() + model(ids_of(rank, 1))).backward()
        check_steps(model, model, make_model(False), f"broken off, sparse={sparse}")
        state.close()


def body_life(rank, size):
    body_come_and_go(rank, size)
    body_broken_off(rank, size)


def test_parameters_that_come_and_go():
    run_ranks(2, body_life)
