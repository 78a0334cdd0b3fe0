"""Support matrix: what DDP and training scripts can be told, by every way into zensync.

All bits are those of one process that sees every batch (`check_steps`), or of stock DDP.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from matrix_ways import (
    COLUMNS,
    DDP_WAYS,
    ROWS,
    WAYS,
    Model,
    Way,
    batch,
    check_steps,
    dense,
    ids_of,
    make_model,
    reference_step,
    require,
    require_gradients,
    run_cells,
    sign_step,
    whole_numbers,
)
from ranks import same_bits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SIZE = 2


def layouts(way, ddp_can=True):
    """Whether tables are sparse=True; the hook's only where DDP itself can."""
    return (False, True) if way != "hook" or ddp_can else (False,)


# ---- what DDP can be told


def cell_unused(kind):
    def sometimes(rank, step):
        return ids_of(rank, step), step == 2 or (rank == 1 and step > 0)

    def cell(rank, size):
        options = {"find_unused_parameters": True} if kind in DDP_WAYS else {}
        for sparse in layouts(kind, ddp_can=False):
            with Way(kind, make_model(sparse), **options) as way:
                check_steps(way, make_model(), sparse, steps=4, batch_of=sometimes)

    return cell


def cell_ddp(kind, **options):
    def cell(rank, size):
        for sparse in (False, True):
            with Way(kind, make_model(sparse), **options) as way:
                check_steps(way, make_model(), (options, sparse), steps=4)

    return cell


def cell_rebuilt(kind):
    """Buckets of one parameter each, made anew after the first step: names stay names."""

    def cell(rank, size):
        for sparse in (False, True):
            model = make_model(sparse)
            with Way(kind, model, bucket_cap_mb=0.0005) as way:
                check_steps(way, make_model(), sparse, steps=4)
                names = set(way.state.stats()["tensors"])
                assert {"table.weight", "some.weight"} <= names
                assert names <= {name for name, _ in model.named_parameters()}, names

    return cell


# ---- what scripts do


class Checkpointed(Model):
    def forward(self, ids):
        rows = self.table(ids) + self.some(ids)
        return self.last(checkpoint(self.layer, rows, use_reentrant=False)).sum()


def cell_checkpoint(kind):
    def cell(rank, size):
        for sparse in (False, True):
            with Way(kind, make_model(sparse, Checkpointed)) as way:
                check_steps(way, make_model(), sparse)

    return cell


def cell_several(kind):
    """Two models with a State each, one loss."""

    def cell(rank, size):
        ways = [Way(kind, make_model(sparse)) for sparse in (False, True)]
        references = [make_model(), make_model()]
        for step in range(3):
            for way in ways:
                way.model.zero_grad()
            sum(way.run(*batch(rank, step)) for way in ways).backward()
            for way, reference in zip(ways, references, strict=True):
                way.sync()
                wanted = reference_step(reference, [batch(other, step) for other in range(size)])
                require_gradients(way, wanted, step)
        for way in ways:
            way.state.close()

    return cell


def cell_frozen(kind):
    def cell(rank, size):
        options = {"find_unused_parameters": True} if kind == "hook" else {}
        for sparse in layouts(kind, ddp_can=False):
            with Way(kind, make_model(sparse), **options) as way:
                reference = make_model()
                for frozen in (False, True, False):
                    for model in (way.model, reference):
                        model.table.weight.requires_grad_(not frozen)
                        model.zero_grad()
                    check_steps(way, reference, (sparse, frozen), steps=2)

    return cell


def cell_added(rank, size):
    for sparse in (False, True):
        with Way("attach", make_model(sparse)) as way:
            reference = make_model()
            check_steps(way, reference, sparse, steps=2)
            for model in (way.model, reference):
                added = whole_numbers(torch.nn.Linear(COLUMNS, COLUMNS, bias=False), 9)
                model.layer = torch.nn.Sequential(model.layer, added)
            check_steps(way, reference, (sparse, "added"), steps=2)


def cell_accumulation(kind):
    def cell(rank, size):
        for sparse in (False, True):
            with Way(kind, make_model(sparse)) as way:
                reference = make_model()
                for first in (0, 10):
                    way.model.zero_grad()
                    with way.no_sync():
                        way.run(*batch(rank, first)).backward()
                        way.run(*batch(rank, first)).backward()
                    assert not same_bits(dense(way.model.table.weight.grad)), "not sent yet"
                    way.run(*batch(rank, first + 1)).backward()
                    way.sync()
                    steps = (first, first, first + 1)
                    batches = [batch(other, step) for other in range(size) for step in steps]
                    wanted = sums_of(reference, batches, size)
                    require_gradients(way, wanted, (sparse, first))

    return cell


def sums_of(reference, batches, size):
    """The gradients of one process, added over batches, divided by the ranks."""
    reference.zero_grad()
    (sum(reference(*one) for one in batches) / size).backward()
    return {name: dense(one.grad) for name, one in reference.named_parameters()}


# ---- dtypes


class Bag(torch.nn.Module):
    """A table whose gradients stay small, so that 16 bits hold them."""

    def __init__(self, sparse):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.scale = torch.nn.Parameter(torch.ones(COLUMNS))

    def forward(self, ids):
        return (self.table(ids) * self.scale).sum()


def cell_halves(kind, dtype):
    def cell(rank, size):
        for sparse in (False, True):
            if kind == "hook" and sparse and dtype == torch.float16:
                continue
            with Way(kind, make_model(sparse, Bag).to(dtype)) as way:
                check_steps(way, make_model(False, Bag).to(dtype), (dtype, sparse))
                assert way.model.table.weight.grad.dtype == dtype

    return cell


def distinct(rank, step):
    """No id twice: then the order in which a rank adds its rows is nobody's choice."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    return (torch.randperm(ROWS, generator=generator)[:48],)


def cell_scaled(kind):
    """autocast and GradScaler, clipped: weights are those of stock DDP."""

    def train(run, model, sync):
        scaler, optimiser = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.5)
        for step in range(3):
            optimiser.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(*distinct(dist.get_rank(), step))
            scaler.scale(loss).backward()
            sync()
            scaler.unscale_(optimiser)
            zensync.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimiser)
            scaler.update()

    def cell(rank, size):
        for sparse in (False, True):
            stock, model = make_model(), make_model(sparse)
            train(DistributedDataParallel(stock), stock, lambda: None)
            with Way(kind, model) as way:
                train(way.run, model, way.sync)
            for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
                # The norm of COO entries is added in another order.
                assert torch.allclose(mine, theirs, rtol=1e-5), sparse
                assert sparse or torch.equal(mine, theirs)
                assert same_bits(mine)
            assert not torch.equal(model.table.weight, make_model().table.weight), "the control"

    return cell


# ---- optimisers

ON_COO = {
    "SGD": lambda tables, rest: [torch.optim.SGD([*tables, *rest], 0.1)],
    "Adagrad": lambda tables, rest: [torch.optim.Adagrad([*tables, *rest], 0.1)],
    "SparseAdam": lambda tables, rest: [
        torch.optim.SparseAdam(tables, 0.1),
        torch.optim.SGD(rest, 0.1),
    ],
}
ON_DENSE = {
    "Adam": lambda tables, rest: [torch.optim.Adam([*tables, *rest], 0.1)],
    "AdamW": lambda tables, rest: [torch.optim.AdamW([*tables, *rest], 0.1)],
    "fused AdamW": lambda tables, rest: [torch.optim.AdamW([*tables, *rest], 0.1, fused=True)],
}


def cell_optimiser(kind, make, sparse):
    """Weights after three steps are, in all bits, those of stock DDP, and on COO gradients those
    of one process (stock DDP has wrong gradients there: `test_matrix_limits.py`)."""

    def train(model, one_step):
        optimisers = make([model.table.weight, model.some.weight], [*model.layer.parameters()])
        for step in range(3):
            model.zero_grad()
            one_step(step)
            if not sparse:
                zensync.clip_grad_norm_(model.parameters(), 50.0)
            for one in optimisers:
                one.step()

    def cell(rank, size):
        wanted, model = make_model(sparse), make_model(sparse)
        ddp = DistributedDataParallel(wanted) if not sparse else None

        def plainly(step):
            if ddp is not None:
                ddp(*distinct(rank, step)).backward()
                return
            (sum(wanted(*distinct(other, step)) for other in range(size)) / size).backward()
            for table in (wanted.table, wanted.some):
                table.weight.grad = table.weight.grad.coalesce()

        def ours(step):
            way.run(*distinct(rank, step)).backward()
            way.sync()

        train(wanted, plainly)
        with Way(kind, model) as way:
            train(model, ours)
        for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert same_bits(mine)
        assert not torch.equal(model.table.weight, make_model().table.weight), "the control"

    return cell


def cell_clip(kind):
    """The norm of what was averaged is that of the dense gradients."""

    def cell(rank, size):
        for sparse in (False, True):
            with Way(kind, make_model(sparse)) as way:
                way.run(*batch(rank, 0)).backward()
                way.sync()
                reference = make_model()
                reference_step(reference, [batch(other, 0) for other in range(size)])
                wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
                norm = zensync.clip_grad_norm_(way.model.parameters(), 1.0)
                assert torch.allclose(norm, wanted, rtol=1e-6)
                for mine, theirs in zip(
                    way.model.parameters(), reference.parameters(), strict=True
                ):
                    assert torch.allclose(dense(mine.grad), theirs.grad, rtol=1e-5)
                    assert same_bits(dense(mine.grad))
            sign_step(way.model)

    return cell


CELLS = {}
for way_ in DDP_WAYS:
    CELLS[f"static_graph, {way_}"] = cell_ddp(way_, static_graph=True)
    CELLS[f"gradient_as_bucket_view, {way_}"] = cell_ddp(way_, gradient_as_bucket_view=True)
    CELLS[f"buckets rebuilt, {way_}"] = cell_rebuilt(way_)
for way_ in WAYS:
    CELLS[f"unused, {way_}"] = cell_unused(way_)
    CELLS[f"checkpointing, {way_}"] = cell_checkpoint(way_)
    CELLS[f"several States, {way_}"] = cell_several(way_)
    CELLS[f"bfloat16, {way_}"] = cell_halves(way_, torch.bfloat16)
    CELLS[f"float16, {way_}"] = cell_halves(way_, torch.float16)
    CELLS[f"clip_grad_norm_, {way_}"] = cell_clip(way_)
    CELLS[f"autocast and GradScaler, {way_}"] = cell_scaled(way_)
    if way_ != "all_reduce":
        CELLS[f"frozen, {way_}"] = cell_frozen(way_)
    CELLS[f"accumulation, {way_}"] = cell_accumulation(way_)
    for name_, make_ in ON_COO.items():
        CELLS[f"{name_} on COO, {way_}"] = cell_optimiser(way_, make_, True)
    for name_, make_ in ON_DENSE.items():
        CELLS[f"{name_} on dense-stored, {way_}"] = cell_optimiser(way_, make_, False)
CELLS["added, attach"] = cell_added


@pytest.fixture(scope="module")
def results():
    return run_cells(SIZE, __name__, CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_options(cell, results):
    require(results, cell)
