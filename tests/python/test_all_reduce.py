"""`zensync.all_reduce` in real processes, against the dense sum of inputs whose sums are exact."""

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from zensync._default_state import default_state

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int32, torch.int64)
# Shapes: scalar, vectors, matrices, more axes, nothing at all, sizes that no rank count divides.
SHAPES = ((), (1,), (997,), (211, 8), (64, 3, 5), (0,), (0, 4), (4, 0))


def make(shape, dtype, rank, density=0.2):
    """One rank's tensor: small integers, whose sums and halves are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape) + len(shape))
    keep = torch.rand(shape, generator=generator) < density
    return (torch.randint(-4, 5, shape, generator=generator) * 4 * keep).to(dtype)


def oracle(shape, dtype, size, average, **options):
    total = sum(make(shape, torch.float64, rank, **options) for rank in range(size))
    return (total / size if average else total).to(dtype)


def check(tensor, expected, what):
    assert tensor.dtype == expected.dtype, what
    assert torch.equal(tensor, expected), f"{what}: {tensor} is not {expected}"
    assert same_bits(tensor), what


def to_coo(dense, sparse_dim, rank):
    """As COO, uncoalesced on odd ranks: every entry is stored in two parts."""
    coo = dense.to_sparse_coo() if sparse_dim == dense.dim() else dense.to_sparse(sparse_dim)
    if rank % 2 == 0 or coo._nnz() == 0:
        return coo
    indices, values = coo.indices(), coo.values()
    half = torch.div(values, 2, rounding_mode="trunc")
    parts = torch.cat([half, values - half]), torch.cat([indices, indices], dim=1)
    return torch.sparse_coo_tensor(parts[1], parts[0], dense.shape, check_invariants=False)


def body_strided(rank, size):
    for dtype in DTYPES:
        for shape in SHAPES:
            for op in (SUM, AVG) if dtype.is_floating_point and size != 3 else (SUM,):
                tensor = make(shape, dtype, rank)
                assert zensync.all_reduce(tensor, op) is None
                check(tensor, oracle(shape, dtype, size, op == AVG), f"{dtype} {shape} {op}")
    for density in (0.0, 1.0):
        tensor = make((500, 4), torch.float32, rank, density)
        zensync.all_reduce(tensor, name=f"density {density}")
        check(tensor, oracle((500, 4), torch.float32, size, False, density=density), density)


def body_coo(rank, size):
    for dtype in DTYPES:
        for shape, sparse_dim in (((211, 8), 1), ((997,), 1), ((20, 30), 2), ((5, 6, 7), 2)):
            for op in (SUM, AVG) if dtype.is_floating_point and size != 3 else (SUM,):
                tensor = to_coo(make(shape, dtype, rank), sparse_dim, rank)
                same = tensor
                zensync.all_reduce(tensor, op)
                assert tensor is same
                assert tensor.is_coalesced()
                assert tensor.sparse_dim() == sparse_dim
                expected = oracle(shape, dtype, size, op == AVG)
                check(tensor.to_dense(), expected, f"{dtype} {shape} {op}")
                assert same_bits(tensor)
    empty = torch.zeros(9, 3).to_sparse(1)
    zensync.all_reduce(empty)
    assert empty._nnz() == 0
    with zensync.State(scheme="dense") as state:
        no_elements = torch.zeros(5, 0).to_sparse(1)
        zensync.all_reduce(no_elements, state=state)
        assert no_elements.shape == (5, 0)
    big = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2**33 - 1]]), torch.ones(2, 2), (2**33, 2), check_invariants=False
    )
    zensync.all_reduce(big)
    assert big.indices().tolist() == [[*range(size), 2**33 - 1]]
    assert big.values()[-1].tolist() == [size, size]


def body_views(rank, size):
    expected = oracle((60, 8), torch.float32, size, False)
    base = torch.full((60, 16), 7.0)
    base[:, ::2] = make((60, 8), torch.float32, rank)
    zensync.all_reduce(base[:, ::2])
    check(base[:, ::2].contiguous(), expected, "strided")
    assert (base[:, 1::2] == 7).all(), "what lies between is untouched"
    turned = make((60, 8), torch.float32, rank).t()
    zensync.all_reduce(turned)
    check(turned.t().contiguous(), expected, "transposed")
    negative = torch.view_as_complex(
        torch.stack([torch.zeros(480), -make((60, 8), torch.float32, rank).reshape(-1)], 1)
    ).conj()
    zensync.all_reduce(negative.imag)  # has the negative bit
    check(negative.imag.clone().reshape(60, 8), expected, "negated view")
    apart = torch.zeros(40).as_strided((3, 4), (10, 2))  # as_strided, but nothing overlaps
    apart.fill_(1.0)
    zensync.all_reduce(apart)
    check(apart.contiguous(), torch.full((3, 4), float(size)), "as_strided")
    odd = torch.zeros(1 + 480)[1:].view(60, 8)  # aligned to the element only
    odd.copy_(make((60, 8), torch.float32, rank))
    zensync.all_reduce(odd)
    check(odd, expected, "odd address")
    leaf = make((60, 8), torch.float32, rank).requires_grad_()
    zensync.all_reduce(leaf)
    check(leaf.detach(), expected, "requires grad")


def body_odd_values(rank, size):
    """NaN, Inf, zeros with a sign, sums that cancel, denormals while this thread flushes them."""
    assert torch.set_flush_denormal(True)
    for scheme in ("balanced", "recursive_doubling", "agsparse", "dense_ring"):
        with zensync.State(scheme=scheme) as state:
            least = torch.tensor([1, 1], dtype=torch.int32).view(torch.float32)
            tensor = torch.zeros(100)
            tensor[0:2] = torch.tensor([float("nan"), float("inf")]) if rank == 0 else 0.0
            tensor[2] = -0.0 if rank == 1 else 0.0
            tensor[3] = 5.0 if rank else -5.0
            tensor[98:].copy_(least)
            zensync.all_reduce(tensor, state=state)
            assert same_bits(tensor)
            bits = tensor.view(torch.int32)
            assert bits[98:].tolist() == [size, size], "denormals add up exactly"
            assert tensor[0] != tensor[0]
            assert tensor[1] == float("inf")
            assert bits[2:98].tolist() == [0] * 96, "+0.0 everywhere"
    torch.set_flush_denormal(False)


def body_rows_and_async(rank, size):
    for step in range(3):
        tensor = make((300, 6), torch.float32, rank, 0.02)
        ids = tensor.any(dim=1).nonzero().reshape(-1).flip(0)
        zensync.all_reduce(tensor, rows=torch.cat([ids, ids[:2]]), name="rows")
        expected = oracle((300, 6), torch.float32, size, False, density=0.02)
        check(tensor, expected, f"rows, step {step}")
    nothing = torch.zeros(300, 6)
    zensync.all_reduce(nothing, rows=torch.zeros(0, dtype=torch.int64), name="rows")
    assert not nothing.any()
    tensors = [make((200, 4), dtype, rank) for dtype in DTYPES]
    works = [zensync.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor, dtype in zip(works, tensors, DTYPES, strict=True):
        assert work.wait() is True
        assert work.is_completed()
        assert work.exception() is None
        assert work.get_future().wait()[0] is tensor
        assert work.result()[0] is tensor
        check(tensor, oracle((200, 4), dtype, size, False), f"async {dtype}")


def body_adapts(rank, size):
    """A tensor without zeros goes to the dense all-reduce after its first job, COO too."""
    state = zensync.State()
    for step in range(4):
        tensor = make((2000, 16), torch.float32, rank, 1.0)
        zensync.all_reduce(tensor, AVG, name="full", state=state)
        check(tensor, oracle((2000, 16), torch.float32, size, True, density=1.0), step)
        coo = to_coo(make((2000, 16), torch.float16, rank, 1.0), 1, rank)
        zensync.all_reduce(coo, name="full coo", state=state)
        expected = oracle((2000, 16), torch.float16, size, False, density=1.0)
        check(coo.to_dense(), expected, f"coo {step}")
    outcomes = {name: report["outcome"] for name, report in state.stats()["tensors"].items()}
    assert outcomes == {"full": "use_dense", "full coo": "use_dense"}, outcomes
    state.close()


def odd_values(dtype, rank):
    """Values whose sums must be rounded, are denormal, cancel, have a sign only, or overflow."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(400, generator=generator).to(dtype)
    limits = torch.finfo(dtype)
    tensor[:5] = torch.tensor([3.0 if rank else -3.0, -0.0, limits.max, 0.0, -0.0 if rank else 0.0])
    tensor[5:50] = limits.smallest_normal / 4
    return tensor


def body_dense_as_sparse(rank, size):
    """The dense all-reduce gives the bits and the indices of a sparse sum (of two ranks, whose
    order of adding does not matter), also where threads flush denormals."""
    everything = [odd_values(dtype, rank) for dtype in FLOATS]
    torch.set_flush_denormal(rank == 1)
    states = [zensync.State(scheme=scheme) for scheme in ("balanced", "dense")]
    results = []
    for state in states:
        mine = []
        for tensor in everything:
            for op in (SUM, AVG):
                mine.append(tensor.clone())
                zensync.all_reduce(mine[-1], op, state=state)
                mine.append(entries_of(tensor, rank))
                zensync.all_reduce(mine[-1], op, state=state)
        results.append(mine)
        outcomes = {report["outcome"] for report in state.stats()["tensors"].values()}
        assert outcomes == {"use_dense" if state is states[1] else "done"}
    torch.set_flush_denormal(False)
    for ours, theirs in zip(*results, strict=True):
        assert same_bits(theirs), theirs
        if ours.layout == torch.sparse_coo:
            assert torch.equal(ours.indices(), theirs.indices())
            assert theirs._nnz() == 301
            ours, theirs = ours.values(), theirs.values()
        assert equal(ours, theirs), ours.dtype
    for state in states:
        state.close()


def entries_of(tensor, rank):
    """Rows 0 to 299 and 350, also explicit zeros; stored in two parts that cancel at row 350."""
    rows = torch.cat([torch.arange(300), torch.tensor([350, 350])])
    values = torch.cat([tensor[:300], torch.tensor([1.0, -1.0]).to(tensor.dtype)])
    values[100:200] = 0.0
    return torch.sparse_coo_tensor(rows[None], values, (400,), check_invariants=False)


def equal(one, other):
    """Whether two tensors have the same bytes."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def body_inference(rank, size):
    """Tensors made in inference mode, written on the worker's thread."""
    for scheme in ("balanced", "dense"):
        with zensync.State(scheme=scheme) as state:
            for op in (SUM, AVG):
                with torch.inference_mode():
                    tensors = [
                        make((60, 8), torch.float32, rank),
                        make((60, 8), torch.float32, rank).t(),
                        make((60, 8), torch.float16, rank),
                        make((60, 8), torch.float32, rank).to_sparse(1),
                    ]
                for place, tensor in enumerate(tensors):
                    assert tensor.is_inference()
                    work = zensync.all_reduce(tensor, op, state=state, async_op=place % 2 == 1)
                    assert work is None or work.wait()
                    whole = tensor.to_dense() if tensor.is_sparse else tensor
                    whole = whole.t() if whole.shape == (8, 60) else whole
                    expected = oracle((60, 8), torch.float32, size, op == AVG)
                    assert torch.equal(whole.float(), expected), (scheme, op, place)


def body_same_again(rank, size):
    """Bytes of inexact sums, for a comparison between two runs in new processes."""
    generator = torch.Generator().manual_seed(rank)
    values = b""
    for _ in range(3):
        tensor = torch.randn(400, 8, generator=generator)
        tensor[torch.rand(400, generator=generator) < 0.9] = 0
        zensync.all_reduce(tensor, name="table")
        assert same_bits(tensor)
        values += tensor.numpy().tobytes()
    return values


@pytest.mark.parametrize("size", [1, 2, 3])
def test_strided(size):
    run_ranks(size, body_strided)


@pytest.mark.parametrize("size", [2, 3])
def test_coo(size):
    run_ranks(size, body_coo, store="tcp")


def body_rest(rank, size):
    body_views(rank, size)
    body_odd_values(rank, size)
    body_rows_and_async(rank, size)
    body_adapts(rank, size)
    body_dense_as_sparse(rank, size)
    body_inference(rank, size)


def test_views_rows_async_and_adapting():
    run_ranks(2, body_rest)


def test_same_bits_in_new_processes():
    first, second = run_ranks(3, body_same_again), run_ranks(3, body_same_again)
    assert first == second
    assert len(set(first)) == 1


# What is refused, and what ranks that disagree learn.


def refused():
    values = torch.ones(4, 4)
    return {
        "complex": values.to(torch.complex64),
        "bool": values.bool(),
        "uint8": values.to(torch.uint8),
        "CSR": values.to_sparse_csr(),
        "CSC": values.to_sparse_csc(),
        "BSR": values.to_sparse_bsr((2, 2)),
        "quantised": torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
        "meta": values.to("meta"),
        "expanded": torch.ones(1, 4).expand(4, 4),
        "overlapping": torch.zeros(6).as_strided((3, 3), (1, 1)),
        "overlapping a little": torch.zeros(9).as_strided((3, 4), (2, 1)),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "fake": FakeTensorMode().from_tensor(values),
        "lazy": torch.nn.parameter.UninitializedParameter(),
        "complex COO": values.to(torch.complex64).to_sparse(),
    }


def body_refused(rank, size):
    state = zensync.State()
    for word, tensor in refused().items():
        with pytest.raises(zensync.UnsupportedError):
            zensync.all_reduce(tensor, state=state)
        assert state.stats()["jobs"] == 0, word
    for tensor, op in ((torch.ones(4, dtype=torch.int32), AVG), (torch.ones(4), dist.ReduceOp.MAX)):
        with pytest.raises(zensync.UnsupportedError):
            zensync.all_reduce(tensor, op, state=state)
    for rows in (torch.tensor([4]), torch.tensor([-1]), torch.tensor([0.5]), [0]):
        with pytest.raises(zensync.Error, match="rows="):
            zensync.all_reduce(torch.ones(4), rows=rows, state=state)
    coo = torch.ones(4).to_sparse()
    with pytest.raises(zensync.Error, match="own indices"):
        zensync.all_reduce(coo, rows=torch.tensor([0]), state=state)
    for name in (3, b"t", "", "\ud800"):
        with pytest.raises(zensync.Error, match="name="):
            zensync.all_reduce(torch.ones(4), name=name, state=state)
    assert state.stats()["sent_bytes"] == 0
    with zensync.State(scheme="dense_ring") as ring:
        with pytest.raises(zensync.UnsupportedError, match="COO"):
            zensync.all_reduce(coo, state=ring)
        zensync.all_reduce(torch.ones(4), state=ring)
    tensor = torch.ones(4)
    zensync.all_reduce(tensor, state=state)  # none of it hurt the State
    assert tensor.tolist() == [size] * 4
    state.close()


def body_mismatch(rank, size):
    """One rank differs in shape, dtype, layout, op or name: MismatchError on all, then refusal."""
    odd = rank == size - 1
    cases = {
        "shape": lambda: (torch.ones(6 if odd else 5, 3), SUM, "t"),
        "dtype": lambda: (torch.ones(5, 3, dtype=torch.float64 if odd else None), SUM, "t"),
        "layout": lambda: (torch.ones(5, 3).to_sparse(1) if odd else torch.ones(5, 3), SUM, "t"),
        "op": lambda: (torch.ones(5, 3), AVG if odd else SUM, "t"),
        "name": lambda: (torch.ones(5, 3), SUM, "u" if odd else "t"),
    }
    for word, case in cases.items():
        state = zensync.State()
        tensor, op, name = case()
        with pytest.raises(zensync.MismatchError) as caught:
            zensync.all_reduce(tensor, op, name=name, state=state)
        assert caught.value is state.last_error, word
        with pytest.raises(zensync.MismatchError):
            zensync.all_reduce(torch.ones(2), state=state)
        state.close()


def body_bad_indices(rank, size):
    """An index outside its axis on one rank, though inside the product of axes: all learn it."""
    for bad in ([[0], [7]], [[1], [-1]], [[-1], [4]]):
        indices = torch.tensor(bad if rank == 1 else [[0], [1]])
        coo = torch.sparse_coo_tensor(indices, torch.ones(1), (4, 5), check_invariants=False)
        with zensync.State() as state, pytest.raises(zensync.Error, match="outside the tensor"):
            zensync.all_reduce(coo, state=state)


def body_default_state_again(rank, size):
    """The default State is made anew after an error of the program, not after a lost rank."""
    for _ in range(2):
        with pytest.raises(zensync.MismatchError):
            zensync.all_reduce(torch.ones(5 + rank), name="t")
        tensor = torch.ones(5)
        zensync.all_reduce(tensor, name="t")
        assert tensor.tolist() == [size] * 5
    if rank == 1:
        default_state(None).close()
    else:
        for _ in range(2):
            with pytest.raises(zensync.PeerLostError):
                zensync.all_reduce(torch.ones(5), name="t")


def body_errors(rank, size):
    body_refused(rank, size)
    body_mismatch(rank, size)
    body_bad_indices(rank, size)
    body_default_state_again(rank, size)


def test_refused_and_mismatched():
    run_ranks(3, body_errors, timeout_s=60)
