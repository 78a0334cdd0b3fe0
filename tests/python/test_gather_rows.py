"""`zensync.all_gather_rows` in real processes, bit for bit against rows of the whole table."""

import re
import time

import pytest
import torch
import zensync
from disagreeing import require_named
from ranks import SOON_S, RankError, die, run_ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
)
LAYOUTS = ("rows", "columns")
TORCH = {"ZENSYNC_TRANSPORT": "torch"}
DISABLED = {"ZENSYNC_DISABLE": "1"}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def table_of(shape, dtype):
    """Any bits, NaN and -0.0 among them."""
    generator = torch.Generator().manual_seed(sum(shape))
    size = torch.empty((), dtype=dtype).element_size()
    count = size * torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def shard_of(whole, rank, size, layout):
    if layout == "columns":
        return whole.chunk(size, dim=1)[rank].contiguous()
    chunks = whole.chunk(size)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def shapes(size, layout):
    if layout == "columns":
        return ((101, size), (40000, 2 * size), (7, 2 * size, 3), (1, size), (5, 0), (0, size))
    return ((101,), (40000, 2), (4 * size, 3, 2), (size + 1, 5), (1, 4), (size - 1, 6), (9, 0))


def ids_of(rows, rank, kind):
    generator = torch.Generator().manual_seed(rank + rows)
    if rows == 0 or kind == "none" or (kind == "one rank" and rank != 0):
        return torch.zeros(0, dtype=torch.int64)
    if kind == "all":
        return torch.arange(rows).flip(0)[:500]
    ids = torch.randint(0, rows, (40,), generator=generator)
    return torch.cat([ids, ids[:7], torch.tensor([rows - 1, 0])])


def body_rows(rank, size):
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for shape in shapes(size, layout):
                whole = table_of(shape, dtype)
                shard = shard_of(whole, rank, size, layout)
                before = bits(shard[:100])
                for kind in ("some", "all", "none", "one rank"):
                    ids = ids_of(shape[0], rank, kind)
                    found = zensync.all_gather_rows(shard, ids, layout=layout, total_rows=shape[0])
                    what = f"{layout} {dtype} {shape} {kind}"
                    assert found.shape == (len(ids), *shape[1:]), what
                    assert found.dtype == dtype, what
                    assert bits(found) == bits(whole[ids]), what
                assert bits(shard[:100]) == before, "param is only read"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_are_those_of_the_table(size):
    run_ranks(size, body_rows)


@pytest.mark.parametrize("env", [TORCH, DISABLED], ids=["torch", "disabled"])
def test_other_ways(env):
    run_ranks(3, body_rows, env=env)


def body_arguments(rank, size):
    """Equal shards need no total_rows; padded and strided shards; ids of any shape; parameters."""
    whole = table_of((4 * size, 6), torch.float32)
    ids = torch.tensor([[3, 0], [4 * size - 1, 3]])
    shard = torch.nn.Parameter(shard_of(whole, rank, size, "rows"))
    found = zensync.all_gather_rows(shard, ids)
    assert not found.requires_grad
    assert found.shape == (2, 2, 6)
    assert bits(found) == bits(whole[ids])
    wide = torch.zeros(4, 12)
    wide[:, ::2] = shard.detach()
    assert bits(zensync.all_gather_rows(wide[:, ::2], ids.t()[0])) == bits(whole[ids.t()[0]])
    short = whole[: 4 * size - 1]
    padded = torch.full((4, 6), 9.0)
    mine = shard_of(short, rank, size, "rows")
    padded[: len(mine)] = mine
    last = torch.tensor([4 * size - 2])
    found = zensync.all_gather_rows(padded, last, total_rows=4 * size - 1)
    assert bits(found) == bits(short[last])
    negative = torch.view_as_complex(torch.stack([whole, -whole], -1)).conj().imag
    part = shard_of(negative, rank, size, "rows")
    assert bits(zensync.all_gather_rows(part, last)) == bits(whole[last])
    with zensync.State() as state:
        zensync.all_gather_rows(shard, ids, name="table", state=state)
        report = state.stats()["tensors"]["table"]
    assert report["scheme"] == "gather_rows"
    assert report["units"] == 3
    assert sum(report["owner_units"]) == 3


def test_arguments():
    run_ranks(2, body_arguments)


def unlike(rank, case, state):
    odd = rank == 1
    shard, rows, options = torch.ones(4, 6), torch.tensor([0, 3, 11]), {}
    if case == "beyond" and odd:
        rows = torch.tensor([0, 12])
    if case == "negative" and odd:
        rows = torch.tensor([-1])
    if case == "int32 ids" and odd:
        rows = rows.int()
    if case == "shape" and odd:
        shard = torch.ones(5, 6)
    if case == "dtype" and odd:
        shard = shard.double()
    if case == "layout" and odd:
        rows, options = rows[:2], {"layout": "columns"}
    if case == "empty table" and odd:
        shard, rows = torch.ones(0, 6), rows[:0]
    if case == "total" and odd:
        options = {"total_rows": 30}
    if case == "coo" and odd:
        shard = shard.to_sparse(1)
    if case == "other call" and odd:
        output = torch.empty(4, 6)
        return zensync.reduce_scatter(output, torch.ones(12, 6), state=state)
    return zensync.all_gather_rows(shard, rows, state=state, **options)


CASES = {
    "beyond": (zensync.Error, "row 12, which is outside [0, 12)"),
    "negative": (zensync.Error, "row -1"),
    "int32 ids": (zensync.Error, "int64"),
    "shape": (zensync.MismatchError, "[15 x 6]"),
    "dtype": (zensync.MismatchError, "float64"),
    "layout": (zensync.MismatchError, 'all_gather_rows(layout="columns")'),
    "empty table": (zensync.MismatchError, "shape"),
    "total": (zensync.Error, "a table of 30 rows by rows has 10"),
    "coo": (zensync.UnsupportedError, "COO"),
    "other call": (zensync.MismatchError, "reduce_scatter"),
}


@pytest.mark.parametrize("env", [{}, TORCH], ids=["native", "torch"])
def test_ranks_that_disagree(env):
    patterns = {case: (kind, re.escape(words)) for case, (kind, words) in CASES.items()}
    require_named(unlike, patterns, env)


def until_it_fails(state):
    while True:
        zensync.all_gather_rows(torch.ones(4, 6), torch.tensor([0, 3, 11]), state=state)


def body_killed(rank, size):
    state = zensync.State(deadline_s=30.0)
    zensync.all_gather_rows(torch.ones(4, 6), torch.tensor([0, 3, 11]), state=state)
    if rank == 1:
        die()
    started = time.monotonic()
    with pytest.raises(zensync.PeerLostError) as raised:
        until_it_fails(state)
    assert raised.value.culprit == 1, raised.value
    assert time.monotonic() - started < SOON_S
    state.close()


def test_a_killed_rank_is_named():
    with pytest.raises(RankError) as raised:
        run_ranks(3, body_killed, exit_codes=False, destroy=False)
    assert len(str(raised.value).splitlines()) == 1, raised.value
    assert str(raised.value).startswith("rank 1 gave no result"), raised.value
