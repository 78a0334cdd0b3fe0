"""`zensync.attach` on FSDP2 modules against stock FSDP2: the same bits, fewer bytes.

Gradients are small whole numbers and ranks two or four, so that all bits must agree.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import die, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from zensync import _fsdp

ROWS, COLUMNS = 8191, 16  # no rank count divides the rows
STEPS = 2


class Model(torch.nn.Module):
    """A table beside a dense layer in the root unit; a block of its own; an unused parameter."""

    def __init__(self, tied=False):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS)
        self.block = torch.nn.Linear(COLUMNS, COLUMNS)
        self.head = torch.nn.Linear(COLUMNS, 3)
        self.never = torch.nn.Parameter(torch.ones(77))
        if tied:
            self.out = torch.nn.Linear(COLUMNS, ROWS, bias=False)
            self.out.weight = self.table.weight
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.arange(one.numel()).view(one.shape) % 5 - 1)

    def forward(self, ids):
        return self.head(self.block(self.table(ids)))


def shard(model, mesh, columns, **options):
    placement = zensync.by_columns if columns else None
    fully_shard(model.block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement, **options)
    return model


def ids_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 400, (64,), generator=generator)


def full_gradients(model):
    """Whole gradients by name; None where there is none."""
    return {
        name: None if one.grad is None else one.grad.full_tensor()
        for name, one in model.named_parameters()
    }


def train(model, optimiser, rank):
    """Losses of some steps, whole gradients of the last one."""
    losses = []
    for step in range(STEPS):
        optimiser.zero_grad()
        loss = model(ids_of(rank, step)).sum()
        loss.backward()
        losses.append(loss.item())
        if step < STEPS - 1:
            optimiser.step()
    return losses, full_gradients(model)


def same(left, right):
    assert left.keys() == right.keys()
    for name, one in left.items():
        assert (one is None) == (right[name] is None), name
        assert one is None or torch.equal(one, right[name]), name


def body_same(rank, size, columns, dtype):
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    mesh = init_device_mesh("cpu", (size,))
    stock = shard(Model(), mesh, columns, mp_policy=policy)
    ours = shard(Model(), mesh, columns, mp_policy=policy)
    expected = train(stock, torch.optim.SGD(stock.parameters(), 1.0), rank)
    state = zensync.attach(ours, deadline_s=30)
    found = train(ours, torch.optim.SGD(ours.parameters(), 1.0), rank)
    assert found[0] == expected[0]
    same(found[1], expected[1])
    assert found[1]["never"] is None
    report = state.stats()["tensors"]["table.weight"]
    state.close()
    return report


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(2, None), (4, None), (2, torch.float64)])
def test_gradients_and_losses_are_those_of_stock(size, dtype, columns):
    dense = ROWS * COLUMNS * (8 if dtype else 4)
    for report in run_ranks(size, body_same, columns, dtype):
        assert report["scheme"] == "reduce_scatter"
        assert max(report["sent_bytes"], report["received_bytes"]) < dense / 20
        if columns:
            assert report["imbalance"] == 1.0
        else:  # the first 400 rows are the first rank's
            assert report["imbalance"] == size


def body_accumulate(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    stock, ours = shard(Model(), mesh, True), shard(Model(), mesh, True)
    state = zensync.attach(ours, deadline_s=30)
    for model in (stock, ours):
        if model is stock:
            model.set_requires_gradient_sync(False)
            model(ids_of(rank, 0)).sum().backward()
            model.set_requires_gradient_sync(True)
        else:
            with state.no_sync():
                with state.no_sync():
                    pass
                model(ids_of(rank, 0)).sum().backward()
            assert state.stats()["jobs"] == 0
        model(ids_of(rank, 1)).sum().backward()
    same(full_gradients(ours), full_gradients(stock))
    assert bool(full_gradients(ours)["table.weight"].any())
    return state.stats()["jobs"]


def test_accumulation_sends_once():
    assert run_ranks(2, body_accumulate) == [1, 1]


def body_dense(rank, size):
    """Steps that touch all rows, then few: the way changes on all ranks at once."""
    mesh = init_device_mesh("cpu", (size,))
    stock, ours = shard(Model(), mesh, True), shard(Model(), mesh, True)
    state = zensync.attach(ours, deadline_s=30)
    real, _fsdp.PROBE_EVERY = _fsdp.PROBE_EVERY, 4
    jobs = []
    for step in range(10):
        ids = torch.arange(ROWS) if step < 3 else ids_of(rank, step)
        for model in (stock, ours):
            model.zero_grad()
            model(ids).sum().backward()
        same(full_gradients(ours), full_gradients(stock))
        jobs.append(state.stats()["jobs"])
    _fsdp.PROBE_EVERY = real
    return jobs


def test_a_table_that_is_not_sparse_goes_dense_and_is_tried_again():
    assert run_ranks(2, body_dense) == [[1, 1, 1, 1, 2, 3, 4, 5, 6, 7]] * 2


def body_tensor_parallel(rank, size):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        model = torch.nn.Sequential(Model().table, torch.nn.Linear(COLUMNS, 1, bias=False))
        torch.nn.init.ones_(model[1].weight)
        plan = {"0": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
        models.append(model)
    stock, ours = models
    for model in (stock, ours):
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=zensync.by_columns)
    state = zensync.attach(ours, deadline_s=30)
    for step in range(2):
        for model in (stock, ours):
            model.zero_grad()
            model(ids_of(rank // 2, step)).sum().backward()
        same(full_gradients(ours), full_gradients(stock))
    report = state.stats()["tensors"]["0.weight"]
    assert isinstance(ours[0].weight, DTensor)
    return report["imbalance"], report["sent_bytes"] < ROWS * COLUMNS


def test_with_tensor_parallelism():
    assert run_ranks(4, body_tensor_parallel) == [(1.0, True)] * 4


def body_hybrid(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stock, ours = shard(Model(), mesh, False), shard(Model(), mesh, False)
    zensync.attach(ours, deadline_s=30)
    for model in (stock, ours):
        model(ids_of(rank, 0)).sum().backward()
    same(full_gradients(ours), full_gradients(stock))


def test_hybrid_sharding():
    run_ranks(4, body_hybrid)


def body_disabled(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    stock, ours = shard(Model(), mesh, True), shard(Model(), mesh, True)
    state = zensync.attach(ours)
    for model in (stock, ours):
        model(ids_of(rank, 0)).sum().backward()
    same(full_gradients(ours), full_gradients(stock))
    return state.stats()["sent_bytes"]


def test_disabled():
    assert run_ranks(2, body_disabled, env={"ZENSYNC_DISABLE": "1"}) == [0, 0]


def body_killed(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    model = shard(Model(), mesh, True)
    zensync.attach(model, deadline_s=30)
    if rank == 1:
        die()
    try:
        model(ids_of(rank, 0)).sum().backward()
    except RuntimeError as why:
        return str(why)
    return ""


def test_a_rank_that_dies_ends_backward():
    with pytest.raises(AssertionError) as why:
        run_ranks(2, body_killed, destroy=False)
    assert "rank 1 gave no result" in str(why.value)
    assert "rank 0 gave no result" not in str(why.value), "it hung"


def refusals(size):
    mesh = init_device_mesh("cpu", (size,))
    sparse = Model()
    sparse.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    partly = Model()
    fully_shard(partly.block, mesh=mesh)
    yield "sparse=True", shard(sparse, mesh, True)
    yield "belong to no FSDP2 unit", partly
    yield "no FSDP2 unit has a table", shard(Model(tied=True), mesh, False)


def body_refused(rank, size):
    for words, model in refusals(size):
        with pytest.raises(zensync.UnsupportedError) as why:
            zensync.attach(model)
        assert words in str(why.value)
    mesh = init_device_mesh("cpu", (size,))
    model = shard(Model(), mesh, True)
    with pytest.raises(zensync.Error) as why:
        zensync.attach(model, parameters="tables")
    assert "leave it out for FSDP2" in str(why.value)
    state = zensync.attach(model)
    with pytest.raises(zensync.Error, match="attached to this module already"):
        zensync.attach(model)
    state.close()
    with pytest.raises(zensync.Error, match="this State is closed"):
        model(ids_of(rank, 0)).sum().backward()
    model = shard(Model(), mesh, True)
    other = dist.new_group([0, 1])
    with pytest.raises(zensync.Error) as why:
        zensync.attach(model, group=other)
    assert "group= is not the group" in str(why.value)


def test_what_is_refused():
    run_ranks(2, body_refused)


def piece(length):
    return _fsdp.Piece(f"{length}", length, 1, False)


def test_which_parameters_are_in_a_buffer():
    pieces = [piece(length) for length in (5, 3, 8, 100)]
    assert _fsdp.subset_of(pieces, 105) == [pieces[0], pieces[3]]
    assert _fsdp.subset_of(pieces, 8) is None, "two choices"
    assert _fsdp.subset_of(pieces, 7) is None, "none"
    assert _fsdp.subset_of([piece(2**at) for at in range(13)], 3) is None, "too many"


def test_columns_are_for_tables():
    table = torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
    assert zensync.by_columns(table).dim == 1
    for shape in ((ROWS,), (4095, 4), (4096, 257), (8, 8, 8)):
        assert zensync.by_columns(torch.nn.Parameter(torch.empty(shape))) is None
