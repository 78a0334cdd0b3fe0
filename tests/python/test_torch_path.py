"""The way of tensors that are not on the CPU, here with CPU tensors over Gloo: its results equal
those of the core's `balanced` bit for bit.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks
from zensync import torch_path
from zensync._tensors import CooParts

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int32, torch.int64)
# Below and above the size from which sizes are exchanged; one row; fewer rows than ranks; none.
SHAPES = ((40001,), (500, 64), (1, 9000), (3, 7000), (3, 4), (33,), (), (0, 4), (1200, 2, 3))
PATTERNS = ("random", "front", "cancel", "minus", "special", "some", "none", "dense")


def bits_of(tensor):
    if tensor.layout == torch.sparse_coo:
        assert tensor.is_coalesced()
        return bits_of(tensor.indices()) + bits_of(tensor.values())
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make(rank, dtype, shape, pattern):
    """One rank's tensor; the order of adding is seen in its sums."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = values * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    flat = values.view(-1)
    rows = values.view(shape[0] if shape else 1, -1) if flat.numel() else values
    density = {"random": 0.3, "dense": 1.0, "cancel": 0.1, "none": 0.0}.get(pattern, 0.03)
    keep = torch.rand(rows.shape[0], generator=generator) < density
    if pattern == "front":
        keep = torch.arange(rows.shape[0]) < max(rows.shape[0] // 20, 1)
    if pattern == "some" and rank % 2 == 0:
        keep[:] = False
    rows[~keep] = -0.0 if pattern == "minus" else 0.0
    if pattern == "cancel" and rank < 2:
        rows[:] = 0
        rows[::3] = 1.5 - 3.0 * rank
    result = values.to(dtype)
    if pattern == "special" and dtype in FLOATS and result.numel() > 3:
        every = result.view(-1)
        every[rank % 2 :: 5] = float("nan")
        every[1::7] = float("inf") if rank % 2 else -float("inf")
        # NaNs with payloads, quiet and signalling, both signs; denormals.
        raw = every.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        quiet = torch.tensor([float("nan")], dtype=dtype).view(raw.dtype)
        half = {2: 1 << 6, 4: 1 << 22, 8: 1 << 51}[dtype.itemsize]
        if dtype == torch.float16:
            half = 1 << 9
        raw[2::11] = (quiet | (rank + 1)) ^ (half if rank % 2 else 0)
        raw[3::13] = rank + 1
    return result


def both(tensor, state, average, name):
    """Bits of the core and of the torch path."""
    ours = tensor.clone()
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    zensync.all_reduce(tensor, op, state=state, name=name)
    # On this thread, where the State's worker has nothing to do.
    if ours.layout == torch.sparse_coo:
        parts, coalesced = CooParts.of(ours), ours.is_coalesced()
        ours, _ = torch_path.reduce_coo(parts, coalesced, state.dense, average=average, name=name)
    else:
        torch_path.reduce_dense(ours, state.dense, average=average, name=name)
    return bits_of(tensor), bits_of(ours)


def coo(rank, dtype, case):
    """A COO tensor of one rank; `case` 0: one axis, 1: two, 2: coalesced, 3: large, 4: no rows."""
    generator = torch.Generator().manual_seed(77 * rank + case)
    shape = ((60, 8), (9, 7, 5), (60, 8), (30000, 4), (0, 4))[case]
    axes = 2 if case == 1 else 1
    entries = 0 if case == 4 or (case == 0 and rank == 1) else 200
    high = [min(length, 900) for length in shape[:axes]]
    index = torch.stack(
        [torch.randint(0, max(most, 1), (entries,), generator=generator) for most in high]
    )
    values = torch.randn((entries, *shape[axes:]), generator=generator, dtype=torch.float64)
    values[::9] = -0.0
    tensor = torch.sparse_coo_tensor(index, (values * 50).to(dtype), shape)
    return tensor.coalesce() if case == 2 else tensor


def body_bits(rank, size, every):
    """A part of the grid: each `every`-th combination of dtype, shape and pattern."""
    wrong, count = [], 0
    with zensync.State(scheme="balanced", deadline_s=60) as state:
        for place, dtype in enumerate(DTYPES):
            for at, shape in enumerate(SHAPES):
                for pattern in PATTERNS[(place + at) % every :: every]:
                    average = dtype in FLOATS and (len(shape) + len(pattern)) % 2 == 0
                    name = f"{dtype} {shape} {pattern} {average}"
                    core, ours = both(make(rank, dtype, shape, pattern), state, average, name)
                    count += 1
                    if core != ours:
                        wrong.append(name)
            for case in range(5):
                for average in {False, dtype in FLOATS}:
                    name = f"{dtype} COO {case} {average}"
                    core, ours = both(coo(rank, dtype, case), state, average, name)
                    count += 1
                    if core != ours:
                        wrong.append(name)
        wide = make(rank, torch.float32, (300, 80), "minus")
        for name, tensor in (("transposed", wide.T), ("step", wide[::3, 1::2])):
            core, ours = both(tensor, state, False, name)
            if core != ours:
                wrong.append(name)
    return wrong, count


def body_reversed(rank, size):
    """How many of two sums differ once ranks are added in reverse order."""
    real, differ = torch_path._push, 0

    def backwards(*args):
        parts, total = real(*args)
        return parts[::-1], total

    with zensync.State(scheme="balanced", deadline_s=60) as state:
        torch_path._push = backwards
        for shape in ((40001,), (33,)):
            core, ours = both(make(rank, torch.float32, shape, "dense"), state, False, f"{shape}")
            differ += core != ours
    return differ


def body_both(rank, size):
    return body_bits(rank, size, 4), body_reversed(rank, size)


def test_bits_are_those_of_balanced():
    """And another order of adding is seen: the control."""
    for (wrong, count), differ in run_ranks(3, body_both):
        assert not wrong
        assert count > 100
        assert differ == 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_bits_of_the_whole_grid(size):
    for wrong, count in run_ranks(size, body_bits, 1):
        assert not wrong
        assert count > 400


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 17])
def test_the_rotation_is_a_bijection(size):
    for units in (0, 1, 2, size - 1, size, size + 1, 97, 200):
        unit_of = torch_path.rotation(units, size, "a name", torch.device("cpu"))
        assert unit_of.shape == (size, -(-units // size))
        found = unit_of[unit_of < units]
        assert sorted(found.tolist()) == list(range(units))
        assert bool((unit_of[:, 1:] > unit_of[:, :-1]).all())


def test_first_rows_of_tables_have_several_owners():
    firsts = {
        int((torch_path.rotation(8, 4, f"table {at}", torch.device("cpu"))[:, 0] == 0).nonzero())
        for at in range(20)
    }
    assert firsts == {0, 1, 2, 3}
