"""`check_every`: a wrong unit that was planted on one rank is named, by tensor, rank and row, on
all ranks; right sums of all kinds pass, and sums that are not due are not looked at.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, sparse
from torch.nn.parallel import DistributedDataParallel
from zensync import _check
from zensync._tensors import CooParts

ROWS, COLUMNS = 32768, 16  # 2 MiB: summed where it lies
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def plant(name, spoil):
    """From now on `spoil()` runs where the sums of `name` arrive, on this rank."""
    real = zensync.State.await_job

    def await_job(state, job, called):
        outcome = real(state, job, called)
        if called == name:
            spoil()
        return outcome

    zensync.State.await_job = await_job


def error_of(call):
    try:
        call()
    except zensync.MismatchError as why:
        return str(why), why.culprit, why.tensor
    return None


def body_planted(rank, size, every):
    tensor = sparse(rank)
    errors = []
    with zensync.State(check_every=every, deadline_s=20) as state:
        if rank == 1:
            plant("table", lambda: tensor[17, 2].add_(0.5))
        for _ in range(10):
            tensor.copy_(sparse(rank))
            errors.append(error_of(lambda: zensync.all_reduce(tensor, name="table", state=state)))
            if errors[-1] is not None:
                break
        failed = state.last_error is not None
    return errors, failed


def test_a_planted_unit_is_named_with_its_tensor_and_rank():
    for errors, failed in run_ranks(3, body_planted, 10):
        assert errors[:-1] == [None] * 9, "only the tenth is due"
        text, culprit, tensor = errors[-1]
        assert "rank 1 has 1 wrong elements, the first in row 17" in text
        assert (culprit, tensor, failed) == (1, "table", True)


def test_without_check_every_nobody_looks():
    for errors, failed in run_ranks(2, body_planted, 0):
        assert errors == [None] * 10
        assert not failed


def body_coo(rank, size):
    with zensync.State(check_every=1, deadline_s=20) as state:
        coo = sparse(rank).to_sparse(1)
        zensync.all_reduce(coo, name="table", state=state)
        if rank == 0:  # what is fetched lacks a row
            real = CooParts.fetch
            CooParts.fetch = lambda *args: real(*args) * (torch.arange(500) != 50).view(-1, 1)
        again = sparse(rank).to_sparse(1)
        return error_of(lambda: zensync.all_reduce(again, name="table", state=state))


def test_a_lost_row_of_a_coo_tensor_is_named():
    for text, culprit, tensor in run_ranks(2, body_coo):
        assert "rank 0 has 4 wrong elements, the first in row 50" in text
        assert (culprit, tensor) == (0, "table")


def body_all(rank, size):
    """The owner adds wrongly: all ranks get the same wrong sum."""
    tensor = sparse(rank)
    plant("table", lambda: tensor[0].add_(3.0))
    with zensync.State(check_every=1, deadline_s=20) as state:
        return error_of(lambda: zensync.all_reduce(tensor, name="table", state=state))


def test_a_sum_that_is_wrong_everywhere():
    for text, culprit, _ in run_ranks(2, body_all):
        assert "the same on all ranks" in text
        assert culprit is None


def special(rank, dtype):
    """Duplicates that cancel, numbers without an end, the largest and the smallest ones."""
    tensor = torch.zeros(600, 3, dtype=dtype)
    generator = torch.Generator().manual_seed(rank)
    tensor[rank::7] = (torch.randn(tensor[rank::7].shape, generator=generator) * 100).to(dtype)
    tensor[100:110] = torch.tensor([1.0, -1.0, 2.0]).to(dtype) * (-1) ** rank
    if dtype in FLOATS:
        tensor[200] = torch.finfo(dtype).max
        tensor[201] = torch.finfo(dtype).tiny / 2
        tensor[202 + rank] = float("nan")
        tensor[210] = float("inf") if rank else -float("inf")
        tensor[211] = float("inf")
    else:
        tensor[200] = torch.iinfo(dtype).max
    return tensor


def body_right(rank, size):
    count = 0
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    with zensync.State(check_every=1, deadline_s=20) as state:
        for dtype in (*FLOATS, torch.int32, torch.int64):
            for op in ops[: 2 if dtype in FLOATS else 1]:
                for make in (
                    special,
                    lambda *a: special(*a).to_sparse(1),
                    lambda *a: special(*a).T,
                ):
                    zensync.all_reduce(make(rank, dtype), op, state=state)
                    count += 1
        for shape in ((), (0, 4), (5,), (2, 3, 4)):
            zensync.all_reduce(torch.ones(shape), state=state)
        everything = torch.full((9000, 8), 0.1)  # dense: it ends in the group's all-reduce
        for _ in range(2):
            zensync.all_reduce(everything.clone(), name="full", state=state)
        assert state.stats()["tensors"]["full"]["outcome"] == "use_dense"
    return count


@pytest.mark.parametrize("size", [1, 2, 3])
def test_right_sums_pass(size):
    assert run_ranks(size, body_right) == [30] * size


def body_training(rank, size, way):
    torch.manual_seed(0)
    table = torch.nn.EmbeddingBag(ROWS, COLUMNS, sparse=way == "coo")
    model = torch.nn.Sequential(table, torch.nn.Linear(COLUMNS, 1))
    if way == "hook":
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        state = zensync.attach(ddp, check_every=2, deadline_s=20)
    else:
        ddp, state = model, zensync.attach(model, check_every=2, deadline_s=20)
    if rank == 1:
        fetch = CooParts.fetch

        def spoil():
            if way == "coo":
                CooParts.fetch = lambda parts, job: fetch(parts, job) * 2
            elif table.weight.grad is not None:
                table.weight.grad[5] += 1.0

        plant("0.weight", spoil)
    found = None
    for step in range(4):
        model.zero_grad()
        try:
            ddp(torch.tensor([[1, 2], [3 + rank, 4]])).sum().backward()
        except RuntimeError as why:
            found = (step, str(why))
            break
    state.close()
    return found


@pytest.mark.parametrize("way", ["dense", "coo", "hook"])
def test_a_planted_unit_is_found_in_training(way):
    for found in run_ranks(2, body_training, way):
        step, text = found
        assert step in (1, 2)
        assert '"0.weight" is not the dense sum' in text
        assert "rank 1 has" in text


def body_shards(rank, size, layout, spoils):
    """A reduce-scatter in blocks of a few rows; rank 1 finds its last row spoilt."""
    _check.BLOCK_ELEMS = 96
    found = []
    with zensync.State(check_every=2, deadline_s=20) as state:
        for _ in range(2):
            table = torch.full((101, 2, 6), 0.1)
            by_rows = layout == "rows"
            own = torch.empty((51 - rank, 2, 6) if by_rows else (101, 2 // size, 6))
            if rank == 1 and spoils:
                plant("shards", lambda own=own: own[-1].add_(1.0))

            def call(own=own, table=table):
                zensync.reduce_scatter(own, table, layout=layout, name="shards", state=state)

            found.append(error_of(call))
    return found


@pytest.mark.parametrize(("layout", "row", "count"), [("rows", 100, 12), ("columns", 100, 6)])
def test_shards_are_checked(layout, row, count):
    for first, second in run_ranks(2, body_shards, layout, True):
        assert first is None
        text, culprit, _ = second
        assert f"rank 1 has {count} wrong elements, the first in row {row}" in text
        assert culprit == 1
    assert run_ranks(2, body_shards, layout, False) == [[None, None]] * 2


def body_unequal(rank, size):
    return error_of(lambda: zensync.State(check_every=rank, deadline_s=20))


def test_ranks_must_ask_for_the_same():
    for text, _, _ in run_ranks(2, body_unequal):
        assert "check_every=" in text


def body_refused(rank, size):
    texts = []
    for value in (-1, 1.5, True, "10"):
        with pytest.raises(zensync.Error) as why:
            zensync.State(check_every=value)
        texts.append(str(why.value))
    return texts


def test_what_is_no_number_is_refused():
    for texts in run_ranks(1, body_refused):
        assert all("check_every= must be a whole number" in text for text in texts)
