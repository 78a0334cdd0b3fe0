"""Support matrix: uneven inputs, with torch's Join. Ranks that have no more batches count as zeros,
so gradients are those of one process in which they contribute nothing.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from matrix_ways import (
    COLUMNS,
    ROWS,
    Way,
    batch,
    dense,
    make_model,
    require,
    require_gradients,
    run_cells,
    sign_step,
)
from ranks import run_ranks, same_bits
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

SIZE = 2
COUNTS = {"after one step": (1, 3), "nothing on one": (4, 0), "even": (2, 2), "late": (3, 5)}


def joinables(way):
    return {"attach": [way.state], "tables": [way.run, way.state], "hook": [way.run]}[way.kind]


def wanted_at(reference, counts, step, divide_by):
    """Gradients of the ranks that have a batch in this step."""
    reference.zero_grad()
    here = [rank for rank, count in enumerate(counts) if step < count]
    total = sum(reference(*batch(rank, step)) for rank in here)
    (total / (len(here) if divide_by == "active" else len(counts))).backward()
    return {name: dense(one.grad) for name, one in reference.named_parameters()}


def uneven(way, counts, **options):
    """Trains in a Join; every rank that is still there compares, at the end all are equal."""
    rank, reference = dist.get_rank(), make_model()
    divide_by = "all" if options.get("divide_by_initial_world_size", True) else "active"
    with Join(joinables(way), **options):
        for step in range(max(counts)):
            wanted = wanted_at(reference, counts, step, divide_by)
            if step < counts[rank]:
                way.model.zero_grad()
                way.run(*batch(rank, step)).backward()
                for name, one in way.model.named_parameters():
                    assert torch.equal(dense(one.grad), wanted[name]), (step, name)
                sign_step(way.model)
            sign_step(reference)
    for name, one in way.model.named_parameters():
        assert torch.equal(one, reference.get_parameter(name)), name
        assert same_bits(one), name


def cell_uneven(kind, sparse):
    def cell(rank, size):
        for what, counts in COUNTS.items():
            with Way(kind, make_model(sparse)) as way:
                uneven(way, counts)
                assert way.state.last_error is None, what

    return cell


def cell_active(kind):
    def cell(rank, size):
        for sparse in (False, True):
            with Way(kind, make_model(sparse)) as way:
                uneven(way, (1, 3), divide_by_initial_world_size=False)

    return cell


def cell_accumulation(kind):
    """What was added up under `no_sync` and not sent before a rank left is not lost."""

    def cell(rank, size):
        for sparse in (False, True):
            with Way(kind, make_model(sparse)) as way:
                reference, steps = make_model(), 4 if rank else 3
                with Join(joinables(way)):
                    for step in range(steps):
                        if step % 2 == 0:
                            way.model.zero_grad()
                            with way.no_sync():
                                way.run(*batch(rank, step)).backward()
                            continue
                        way.run(*batch(rank, step)).backward()
                reference.zero_grad()
                sum(reference(*batch(*one)) / 2 for one in ((0, 2), (1, 2), (1, 3))).backward()
                wanted = {name: dense(one.grad) for name, one in reference.named_parameters()}
                require_gradients(way, wanted, sparse)

    return cell


def cell_after(kind):
    """After the block, and with evaluation inside it, all goes on as before."""

    def cell(rank, size):
        with Way(kind, make_model(True)) as way:
            for counts in ((1, 2), (3, 1)):
                with Join(joinables(way)):
                    for step in range(counts[rank]):
                        with torch.no_grad():
                            way.model(*batch(rank, step))
                        way.model.zero_grad()
                        way.run(*batch(rank, step)).backward()
                way.model.zero_grad()
                way.run(*batch(rank, 7)).backward()
                assert all(same_bits(dense(one.grad)) for one in way.model.parameters())
                assert not torch.equal(
                    dense(way.model.table.weight.grad), torch.zeros(ROWS, COLUMNS)
                ), "the control"

    return cell


def one_step_each(way, joined, rank):
    """Backward passes that were done before the block ended."""
    done = 0
    with joined:
        for step in range(1 + rank):
            way.model.zero_grad()
            way.run(*batch(rank, step)).backward()
            done += 1
    return done


def cell_throws(rank, size):
    with Way("attach", make_model(True)) as way:
        with pytest.raises(RuntimeError, match="exhausted"):
            one_step_each(way, Join([way.state], throw_on_early_termination=True), rank)
        assert one_step_each(way, Join([way.state], enable=False), 0) == 1
        assert same_bits(dense(way.model.table.weight.grad))


def cell_refused(rank, size):
    """Orders that cannot work, and States that have nothing to join."""
    for order in ("behind", "before"):
        way = Way("tables" if order == "before" else "attach", make_model(True))
        other = DistributedDataParallel(torch.nn.Linear(1, 1))
        first = [way.state, way.run] if order == "before" else [other, way.state]
        with pytest.raises(zensync.UnsupportedError, match=r"Join\(\[ddp, state\]\)"):
            one_step_each(way, Join(first), 0)
        way.state.close()
    with zensync.State() as state, pytest.raises(zensync.Error, match="attach returned"):
        Join([state])


def body_stock(rank, size):
    ddp = DistributedDataParallel(make_model(True))
    try:
        with Join([ddp]):
            for step in range(1 + rank):
                ddp(*batch(rank, step)).backward()
    except RuntimeError as why:
        return str(why)
    return ""


def body_stock_at_once(rank, size):
    """The control: that same use is right where no rank stops after one step."""
    ddp = DistributedDataParallel(make_model(True))
    with Join([ddp]):
        for step in range(2):
            ddp(*batch(rank, step)).backward()
    return ""


def test_torch_itself_fails_on_sparse_tables_after_one_step():
    """A limit of torch, without zensync; attach a plain module, or its tables, in its place."""
    failed = run_ranks(2, body_stock, exit_codes=False, destroy=False)
    assert any(failed), "torch has mended it: the limit of the matrix can go"
    assert run_ranks(2, body_stock_at_once) == ["", ""]


CELLS = {
    **{
        f"{kind} {'sparse' if sparse else 'dense'}": cell_uneven(kind, sparse)
        for kind in ("attach", "tables")
        for sparse in (True, False)
    },
    "hook dense": cell_uneven("hook", False),
    "attach active": cell_active("attach"),
    "attach accumulation": cell_accumulation("attach"),
    "attach after": cell_after("attach"),
    "tables after": cell_after("tables"),
    "attach throws": cell_throws,
    "refused": cell_refused,
}


@pytest.fixture(scope="module")
def results():
    return run_cells(SIZE, __name__, CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_join(cell, results):
    require(results, cell)


PLAINLY = [name for name in CELLS if name.startswith("attach")]


@pytest.fixture(scope="module")
def results_of_plain():
    return run_cells(SIZE, __name__, PLAINLY, env={"ZENSYNC_DISABLE": "1"})


@pytest.mark.parametrize("cell", PLAINLY)
def test_join_disabled(cell, results_of_plain):
    """With ZENSYNC_DISABLE=1, over the group's own all-reduce."""
    require(results_of_plain, cell)
