"""Support matrix: symptoms that people report of sparse gradients, where no other test shows that
zensync does not have them. The rows are in coverage_cases.py.
"""

import pytest
import torch
import torch.distributed as dist
import zensync
from matrix_ways import COLUMNS, ROWS, Way, dense, make_model, require, run_cells
from ranks import run_ranks, same_bits
from torch.nn.parallel import DistributedDataParallel

SIZE = 2
AVG = dist.ReduceOp.AVG


def coo(rows, values, shape):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=False)


def cell_half_duplicates(rank, size):
    """fp16: 40000 + 40000 − 40000 on each rank overflows unless it is added in fp32."""
    values = torch.tensor([[4e4], [4e4], [-4e4]], dtype=torch.float16).expand(3, COLUMNS)
    tensor = coo([5, 5, 5], values.clone(), (ROWS, COLUMNS))
    assert not torch.isfinite(tensor.coalesce().values()).all(), "the control: torch adds in fp16"
    zensync.all_reduce(tensor, AVG)
    assert tensor.to_dense()[5].eq(4e4).all()
    dense_stored = torch.zeros(ROWS, COLUMNS, dtype=torch.float16)
    dense_stored[5] = 4e4  # the sum of two ranks is no fp16 number, their mean is
    zensync.all_reduce(dense_stored, AVG)
    assert dense_stored[5].eq(4e4).all()
    model = torch.nn.Embedding(ROWS, COLUMNS, sparse=True, dtype=torch.float16)
    with zensync.attach(model):
        (model(torch.tensor([5])) * 4e4).sum().backward()
        assert model.weight.grad.to_dense()[5].eq(4e4).all()


def cell_bags(rank, size):
    """EmbeddingBag, sparse: all get all rows; rows whose elements cancel are not lost."""
    for kind in ("attach", "tables", "hook"):
        for mode in ("sum", "mean"):
            torch.manual_seed(3)
            table = torch.nn.EmbeddingBag(ROWS, 2, sparse=True, mode=mode)
            model = torch.nn.Sequential(table, torch.nn.Linear(2, 1, bias=False))
            with torch.no_grad():
                model[1].weight.copy_(torch.tensor([[1.0, -1.0]]))
            with Way(kind, model) as way:
                ids = torch.tensor([[7 + rank, 100], [300 * (rank + 1), 8]])
                way.run(ids).sum().backward()
                gradient = dense(table.weight.grad)
                assert same_bits(gradient)
                touched = gradient.abs().any(dim=1).nonzero().reshape(-1).tolist()
                assert touched == [7, 8, 100, 300, 600], (kind, touched)
                assert not gradient.sum(dim=1).any(), "the control: each row's sum is zero"


def cell_cancelled(rank, size):
    """Rows (+1, −1) in dense-stored tensors, and units whose sum over the ranks is zero."""
    tensor = torch.zeros(ROWS, 2)
    tensor[3 + rank] = torch.tensor([1.0, -1.0])
    tensor[9] = 1.0 if rank else -1.0
    zensync.all_reduce(tensor)
    assert tensor[3:5].tolist() == [[1.0, -1.0]] * 2
    assert not tensor[9].any(), "a cancelled row overwrites what a rank had"


def sent_bytes(state, tensor, name, **options):
    before = state.stats()["sent_bytes"]
    zensync.all_reduce(tensor, name=name, state=state, **options)
    return state.stats()["sent_bytes"] - before


def cell_duplicates(rank, size):
    """Duplicates are added up before they travel: forty times the entries, the same bytes."""
    rows = torch.arange(rank, 400, 2).tolist()
    with zensync.State(scheme="balanced") as state:
        once = coo(rows, torch.ones(len(rows), COLUMNS), (ROWS, COLUMNS))
        often = coo(rows * 40, torch.ones(40 * len(rows), COLUMNS), (ROWS, COLUMNS))
        few, many = sent_bytes(state, once, "once"), sent_bytes(state, often, "often")
        assert abs(many - few) <= 64, (few, many)
        assert many < often.values().nbytes
        assert often.is_coalesced()
        assert often.to_dense().sum() == 40 * once.to_dense().sum()


def cell_half_bytes(rank, size):
    """16-bit gradients travel as 16 bits, also those of rows."""
    with zensync.State(scheme="balanced") as state:
        wide = coo(list(range(500)), torch.ones(500, 64), (ROWS, 64))
        half = coo(list(range(500)), torch.ones(500, 64).half(), (ROWS, 64))
        pushed = sent_bytes(state, wide, "wide"), sent_bytes(state, half, "half")
        assert pushed[1] < 0.8 * pushed[0], pushed
    with pytest.raises(TypeError, match="wire_dtype"):
        zensync.State(wire_dtype=torch.float16)


def cell_max_bytes(rank, size):
    """A table far larger than the workspace it may use, in chunks."""
    tensor = torch.zeros(1 << 18, 16)
    tensor[rank::8] = 1.0
    with zensync.State(scheme="balanced", max_bytes=1 << 20) as state:
        zensync.all_reduce(tensor, name="table", state=state)
        chunks = state.stats()["tensors"]["table"]["chunk_ends"]
    assert len(chunks) > 4, chunks
    assert tensor[0::8].eq(1).all()
    assert tensor[1::8].eq(1).all()
    assert not tensor[2::8].any()


def cell_csr(rank, size):
    """A parameter that is stored as CSR is refused, on all ranks; so is such a gradient."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.eye(6).to_sparse_csr())
    with pytest.raises(zensync.UnsupportedError, match="csr"):
        zensync.attach(holder)
    with pytest.raises(zensync.UnsupportedError, match="CSR"):
        zensync.all_reduce(torch.eye(6).to_sparse_csr())


def top_k(state, bucket):
    """A hook with error feedback: the largest entries now, the rest with the next step."""
    buffer = bucket.buffer()
    error = state["errors"].setdefault(bucket.index(), torch.zeros_like(buffer))
    buffer.add_(error)
    chosen = buffer.abs().topk(max(1, len(buffer) // 20)).indices
    kept = torch.zeros_like(buffer)
    kept[chosen] = buffer[chosen]
    torch.sub(buffer, kept, out=error)
    name = f"bucket {bucket.index()} {len(buffer)}"
    work = zensync.all_reduce(kept, AVG, name=name, state=state["state"], async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def cell_top_k(rank, size):
    """Top-k of a bucket in one future: no gradient is lost, what was not sent comes later."""
    model = torch.nn.Linear(100, 40)
    ddp = DistributedDataParallel(model)
    with zensync.State() as state:
        feedback = {"state": state, "errors": {}}
        ddp.register_comm_hook(feedback, top_k)
        given, taken = torch.zeros(40, 100), torch.zeros(40, 100)
        for step in range(4):
            ddp.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            values = torch.randint(-8, 9, (40, 100), generator=generator).float() * 4
            (ddp.module.weight * 0).sum()
            (ddp(torch.eye(100)) * values.t()).sum().backward()
            given += values
            taken += model.weight.grad
            assert same_bits(model.weight.grad)
            assert 0 < model.weight.grad.count_nonzero() < 0.2 * 4000
        left = torch.cat([one.reshape(-1) for one in feedback["errors"].values()])
        both = torch.stack([given.sum(), left.sum(), torch.zeros(())])
        dist.all_reduce(both)
    weight_and_bias = taken.sum() * size
    assert left.any()
    assert both[0] != weight_and_bias, "the control: something is held back"


def cell_names(rank, size):
    """What is known of a parameter is kept by its name, also when buckets are made anew."""
    model = make_model(True)
    with Way("hook", model, bucket_cap_mb=0.0005) as way:
        for step in range(3):
            model.zero_grad()
            way.run(torch.arange(20) * (step + 1)).backward()
            assert {"table.weight", "some.weight"} <= set(way.state.stats()["tensors"])
    assert not hasattr(way.state, "state_dict"), "a lossless sum has no state to keep"


CELLS = {
    "fp16 duplicates": cell_half_duplicates,
    "EmbeddingBag": cell_bags,
    "cancelled rows": cell_cancelled,
    "duplicates before the wire": cell_duplicates,
    "16-bit rows": cell_half_bytes,
    "max_bytes": cell_max_bytes,
    "CSR": cell_csr,
    "top-k": cell_top_k,
    "names": cell_names,
}


@pytest.fixture(scope="module")
def results():
    return run_cells(SIZE, __name__, CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_users(cell, results):
    require(results, cell)


def body_flat(rank, size):
    """Bytes of one rank for a table in which all ranks touch the same rows."""
    result = {}
    for scheme in ("balanced", "agsparse"):
        with zensync.State(scheme=scheme) as state:
            tensor = torch.zeros(ROWS, COLUMNS)
            tensor[::20] = 1.0
            result[scheme] = sent_bytes(state, tensor, "table")
    return result


def test_bytes_of_a_rank_do_not_grow_with_ranks():
    """n from 2 to 4: values are 2·(1−1/n) of the rows, 1.5 times as many; gathering sends 3 times
    as many, which is the control."""
    two, four = run_ranks(2, body_flat), run_ranks(4, body_flat)
    for scheme, most, least in (("balanced", 1.7, 1.0), ("agsparse", 3.2, 2.5)):
        growth = max(one[scheme] for one in four) / max(one[scheme] for one in two)
        assert least <= growth <= most, (scheme, growth)
