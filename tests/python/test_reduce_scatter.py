"""`zensync.reduce_scatter` in real processes, bit for bit against `all_reduce` with "balanced" and
a slice, and against the dense sum of inputs whose sums are exact.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int32, torch.int64)
LAYOUTS = ("rows", "columns")
TORCH = {"ZENSYNC_TRANSPORT": "torch"}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def make(shape, dtype, rank, density=0.2, scale=4.0):
    """One rank's tensor; with the usual scale sums and quarters are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    keep = torch.rand(shape[:1], generator=generator) < density
    values = torch.randint(-4, 5, shape, generator=generator) * scale
    values[~keep] = 0.0
    return (values + 0.0).to(dtype)  # no -0.0


def part(whole, rank, size, layout):
    """This rank's part, by torch's own functions: as FSDP2 cuts parameters."""
    if layout == "columns":
        return whole.chunk(size, dim=1)[rank]
    chunks = whole.chunk(size)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def oracle(shape, dtype, size, average, **options):
    total = sum(make(shape, torch.float64, rank, **options) for rank in range(size))
    return (total / size if average else total).to(dtype)


def shapes(size, layout):
    if layout == "columns":
        return ((101, size), (64, 3 * size), (7, 2 * size, 3), (1, size), (0, size), (5, 0))
    return (
        (101,),
        (101, 8),
        (4 * size, 3),
        (size + 1, 2, 5),
        (1, 4),
        (size - 1, 6),
        (0, 4),
        (9, 0),
    )


def body_exact(rank, size):
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for shape in shapes(size, layout):
                for op in (SUM, AVG) if dtype.is_floating_point and size != 3 else (SUM,):
                    what = f"{layout} {dtype} {shape} {op}"
                    tensor = make(shape, dtype, rank)
                    before = bits(tensor)
                    wanted = part(oracle(shape, dtype, size, op == AVG), rank, size, layout)
                    output = torch.full(wanted.shape, 77, dtype=dtype)
                    assert zensync.reduce_scatter(output, tensor, op, layout=layout) is None, what
                    assert bits(output) == bits(wanted), what
                    assert bits(tensor) == before, f"{what}: the input was changed"
    for layout in LAYOUTS:  # nothing at all, and everything
        for density in (0.0, 1.0):
            shape = (50, 4 * size)
            wanted = oracle(shape, torch.float32, size, False, density=density)
            output = torch.full_like(part(wanted, rank, size, layout), 5.0).contiguous()
            zensync.reduce_scatter(output, make(shape, torch.float32, rank, density), layout=layout)
            assert bits(output) == bits(part(wanted, rank, size, layout))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_are_exact(size):
    run_ranks(size, body_exact)


def test_over_the_torch_driver():
    run_ranks(3, body_exact, env=TORCH)


def odd_values(shape, dtype, rank):
    """Values whose sums must be rounded, that cancel, have a sign only, overflow, are NaN."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(shape, generator=generator)
    tensor[torch.rand(shape[0], generator=generator) < 0.6] = 0.0
    tensor = tensor.to(dtype)
    flat, limits = tensor.view(-1), torch.finfo(dtype)
    flat[:3] = 3.0 if rank % 2 else -3.0  # cancels for even n
    flat[3:40] = -0.0
    flat[40] = -0.0 if rank else 0.0
    flat[41] = float("nan") if rank == 0 else 1.0
    flat[42] = float("inf") if rank == 1 else -1.0
    flat[43] = limits.max
    flat[44:50] = limits.smallest_normal / 4
    flat[-1] = float("nan")
    return tensor


def body_as_all_reduce(rank, size, shape):
    """The bits of `all_reduce` with "balanced", which adds in the order of ranks."""
    torch.set_flush_denormal(rank == 0)
    with zensync.State(scheme="balanced") as state:
        for dtype in FLOATS:
            for op in (SUM, AVG):
                given = odd_values(shape, dtype, rank)
                whole = given.clone()
                zensync.all_reduce(whole, op, state=state)
                for layout in LAYOUTS:
                    tensor = given.clone()
                    wanted = part(whole, rank, size, layout)
                    output = torch.empty(wanted.shape, dtype=dtype)
                    zensync.reduce_scatter(output, tensor, op, layout=layout, state=state)
                    assert bits(output) == bits(wanted), f"{dtype} {op} {layout}"
                    positive = torch.where(given == 0, torch.zeros((), dtype=dtype), given)
                    assert bits(tensor) == bits(positive), "+0.0 for -0.0, else untouched"
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits_are_those_of_all_reduce(size):
    assert all(run_ranks(size, body_as_all_reduce, (61, 12)))


def body_storage(rank, size):
    shape = (50, 4 * size)
    whole = oracle(shape, torch.float32, size, False)
    for layout in LAYOUTS:
        wanted = part(whole, rank, size, layout)
        # Strided input and output; what lies between is untouched.
        base = torch.full((shape[0], 2 * shape[1]), -0.0)
        base[:, ::2] = make(shape, torch.float32, rank)
        before = bits(base)
        wide = torch.full((wanted.shape[0], 2 * wanted.shape[1]), 7.0)
        zensync.reduce_scatter(wide[:, ::2], base[:, ::2], layout=layout)
        assert bits(wide[:, ::2]) == bits(wanted)
        assert (wide[:, 1::2] == 7).all()
        assert bits(base) == before
        # Transposed, negated, with a gradient, inference, at an odd address.
        turned = make(shape, torch.float32, rank).t().contiguous().t()
        output = torch.empty_like(wanted.t()).t()
        zensync.reduce_scatter(output, turned, layout=layout)
        assert bits(output) == bits(wanted)
        pair = torch.stack([torch.zeros(shape), -make(shape, torch.float32, rank)], -1)
        negative = torch.view_as_complex(pair).conj().imag
        assert negative.is_neg()
        leaf = torch.empty(wanted.shape, requires_grad=True)
        zensync.reduce_scatter(leaf, negative, layout=layout)
        assert bits(leaf.detach()) == bits(wanted)
        turned_sign = torch.view_as_complex(torch.zeros(*wanted.shape, 2)).conj().imag
        zensync.reduce_scatter(turned_sign, make(shape, torch.float32, rank), layout=layout)
        assert bits(turned_sign.resolve_neg()) == bits(wanted)
        with torch.inference_mode():
            frozen = torch.empty(wanted.shape)
        zensync.reduce_scatter(frozen, make(shape, torch.float32, rank), layout=layout)
        assert bits(frozen) == bits(wanted)
        odd = torch.zeros(1 + wanted.numel())[1:].view(wanted.shape)
        zensync.reduce_scatter(odd, make(shape, torch.float32, rank), layout=layout)
        assert bits(odd) == bits(wanted)


def test_any_strides():
    run_ranks(2, body_storage)
    run_ranks(3, body_storage)


def body_padded(rank, size):
    for rows in (0, 1, size - 1, size + 1, 4 * size + 1):
        whole = oracle((rows, 3), torch.float64, size, False, density=0.9)
        wanted = part(whole, rank, size, "rows")
        most = -(-rows // size)
        wide = torch.full((most, 6), 9.0, dtype=torch.float64)
        tensor = make((rows, 3), torch.float64, rank, 0.9)
        zensync.reduce_scatter(wide[:, ::2], tensor)
        assert bits(wide[: len(wanted), ::2]) == bits(wanted)
        assert bits(wide[len(wanted) :, ::2]) == [0] * (8 * 3 * (most - len(wanted))), "+0.0"
        assert (wide[:, 1::2] == 9).all()


def test_padded_outputs():
    run_ranks(4, body_padded)


def body_async(rank, size):
    with zensync.State() as state:
        outputs, works, wanted = [], [], []
        for number, dtype in enumerate(DTYPES):
            layout = LAYOUTS[number % 2]
            whole = oracle((60, 2 * size), dtype, size, False)
            wanted.append(part(whole, rank, size, layout))
            outputs.append(torch.empty(wanted[-1].shape, dtype=dtype))
            works.append(
                zensync.reduce_scatter(
                    outputs[-1],
                    make((60, 2 * size), dtype, rank),
                    layout=layout,
                    async_op=True,
                    state=state,
                    name=f"table {number}",
                )
            )
            zensync.all_reduce(torch.ones(3), state=state)  # between, in one order
        for work, output, expected in zip(works, outputs, wanted, strict=True):
            assert work.wait() is True
            assert work.is_completed()
            assert work.exception() is None
            assert work.result()[0] is output
            assert work.get_future().wait()[0] is output
            assert bits(output) == bits(expected)
        dist.barrier()
        if rank == 0:
            late = zensync.reduce_scatter(
                torch.empty(2), torch.ones(2 * size), async_op=True, state=state
            )
            with pytest.raises(zensync.DeadlineError, match="reduce_scatter has not ended"):
                late.wait(0.2)
        dist.barrier()
        if rank != 0:
            zensync.reduce_scatter(torch.empty(2), torch.ones(2 * size), state=state)
        state.flush()


def test_async():
    run_ranks(2, body_async)


def body_report(rank, size):
    """Rows by frequency: low ids are in use, and all of them belong to rank 0."""
    table = torch.zeros(400, 16)
    table[:50] = 1.0 + rank
    reports = {}
    with zensync.State() as state:
        for layout in LAYOUTS:
            for name in (layout, None):
                output = torch.empty((100, 16) if layout == "rows" else (400, 4))
                zensync.reduce_scatter(output, table, layout=layout, state=state, name=name)
            reports[layout] = state.stats()["tensors"][layout]
        reports["default"] = "reduce_scatter float32[400,16] dense" in state.stats()["tensors"]
    return reports


def test_reports():
    """Row shards are as uneven as the ids, columns exactly even; bytes are those of non-zeros."""
    results = run_ranks(4, body_report)
    assert all(reports["default"] for reports in results)
    rows = [reports["rows"] for reports in results]
    columns = [reports["columns"] for reports in results]
    assert all(report["owner_units"] == [50, 0, 0, 0] for report in rows)
    assert all(report["imbalance"] == 4.0 for report in rows)
    assert all(report["owner_units"] == [50] * 4 for report in columns)
    assert all(report["imbalance"] == 1.0 for report in columns)
    assert {report["scheme"] for report in rows + columns} == {"reduce_scatter"}
    assert [report["layout"] for report in (rows[0], columns[0])] == list(LAYOUTS)
    assert [report["union_units"] for report in rows] == [50, 0, 0, 0]
    values = 50 * 16 * 4
    assert values < rows[0]["received_bytes"] / 3 < values + 300
    assert values < rows[1]["sent_bytes"] < values + 1000
    for report in columns:
        assert values * 3 / 4 < report["sent_bytes"] < values * 3 / 4 + 1000
        assert report["sent_bytes"] == report["received_bytes"]


def body_disabled(rank, size):
    for layout in LAYOUTS:
        for shape in ((50, 4 * size), (size - 1, 4 * size), (0, size)):
            for op in (SUM, AVG):
                wanted = part(oracle(shape, torch.float32, size, op == AVG), rank, size, layout)
                output = torch.full(wanted.shape, 3.0)
                tensor = make(shape, torch.float32, rank)
                before = bits(tensor)
                work = zensync.reduce_scatter(output, tensor, op, layout=layout, async_op=True)
                assert work.wait()
                assert torch.equal(output, wanted)
                assert bits(tensor) == before
    wide = torch.full((2, 3), 5.0)
    assert zensync.reduce_scatter(wide, torch.ones(2 * size - 1, 3)) is None
    assert wide.tolist() == [[size] * 3, [0 if rank == size - 1 else size] * 3]
    with pytest.raises(zensync.Error, match="part of rank"):
        zensync.reduce_scatter(torch.empty(3, 3), torch.ones(2 * size, 3))


def test_disabled():
    run_ranks(2, body_disabled, env={"ZENSYNC_DISABLE": "1"})
    run_ranks(4, body_disabled, env={"ZENSYNC_DISABLE": "1"})


def body_spoilt(rank, size):
    """The control of `bits`: one wrong bit, and one wrong sign of a zero, are seen."""
    output = torch.zeros(4)
    assert bits(output) != bits(torch.tensor([0.0, 0.0, 0.0, -0.0]))


def test_controls():
    run_ranks(2, body_spoilt)
    assert bits(part(torch.arange(5.0), 1, 2, "rows")) == bits(torch.tensor([3.0, 4.0]))
