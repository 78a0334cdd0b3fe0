"""`zensync.hook` under real DDP, against DDP without a hook; gradients are exact, so that all bits
must agree."""

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, same_bits
from torch.nn.parallel import DistributedDataParallel

ROWS, COLUMNS = 8192, 16  # 512 KiB
STEPS = 5


class Model(torch.nn.Module):
    """A table between dense layers: with one bucket they all share it. Gradients are small
    integers."""

    def __init__(self, sparse):
        super().__init__()
        self.first = torch.nn.Linear(COLUMNS, COLUMNS)
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.wide = torch.nn.Linear(COLUMNS, 2048, bias=False)  # 128 KiB, dense
        self.last = torch.nn.Linear(COLUMNS, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape).float())

    def forward(self, ids):
        rows = self.table(ids)
        return self.last(self.first(rows)).sum() + 0.5 * self.wide(rows).sum()


def ids_of(rank, step, count=64):
    generator = torch.Generator().manual_seed(77 * step + rank)
    return torch.randint(0, ROWS, (count,), generator=generator)


def make_model(sparse):
    torch.manual_seed(5)
    return Model(sparse)


def train(model, state, bucket_view, steps=STEPS, count=64):
    """Gradients of every step, as dense copies; weights move by whole numbers."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view, bucket_cap_mb=64)
    if state is not None:
        ddp.register_comm_hook(state, zensync.hook)
    history = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(ids_of(rank, step, count)).backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient.layout == torch.sparse_coo:
                assert state is None or gradient.is_coalesced()
                gradient = gradient.to_dense()
            gradients[name] = gradient.clone()
        history.append(gradients)
    return history


def compare(ours, stock, what):
    for step, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        for name, gradient in theirs.items():
            assert torch.equal(mine[name], gradient), f"{what}: step {step}, {name}"
            assert same_bits(mine[name]), f"{what}: step {step}, {name}"


def body_equals_stock(rank, size):
    for sparse in (False, True):
        for bucket_view in (False, True):
            for known in (True, False):
                what = f"sparse={sparse} view={bucket_view} module={known}"
                stock = train(make_model(sparse), None, bucket_view)
                model = make_model(sparse)
                state = zensync.State(module=model if known else None)
                compare(train(model, state, bucket_view), stock, what)
                check_table(state, known, what)
                assert state.last_error is None
                state.close()


def check_table(state, known, what):
    """The table went sparse though it shares its bucket; the wide dense layer did not."""
    reports = state.stats()["tensors"]
    tables = {name: report for name, report in reports.items() if report["outcome"] == "done"}
    assert len(tables) == 1, f"{what}: {reports}"
    if known:
        assert set(tables) == {"table.weight"}, what
    dense_bytes = state.stats()["dense_bytes"] / STEPS
    rest = 4 * (COLUMNS * COLUMNS + COLUMNS + 2048 * COLUMNS + COLUMNS + 1)
    assert dense_bytes == rest, f"{what}: {dense_bytes} through the dense all-reduce, not {rest}"


def body_adapts(rank, size):
    """A table that gets full goes dense; once it is emptier, a probe brings it back to sparse."""
    model = make_model(False)
    state = zensync.State(module=model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=64)
    ddp.register_comm_hook(state, zensync.hook)
    outcomes = []
    full = 8 * ROWS
    for step in range(80):
        before = state.stats()["dense_bytes"]
        ddp.zero_grad()
        ids = ids_of(rank, step, full if step < 3 else 32)
        ddp(ids).backward()
        expected = torch.zeros(ROWS).index_add_(
            0,
            torch.cat([ids_of(r, step, len(ids)) for r in range(size)]),
            torch.ones(size * len(ids)),
        )
        touched = model.table.weight.grad.any(dim=1)
        assert torch.equal(touched, touched & (expected > 0)), step
        assert same_bits(model.table.weight.grad)
        outcomes.append(state.stats()["dense_bytes"] - before > ROWS * COLUMNS * 4)
    assert not outcomes[0], "it starts sparse"
    assert all(outcomes[1:10]), "it goes dense once it was seen to be full"
    assert not outcomes[-1], "it comes back to sparse"
    state.close()


def body_three(rank, size):
    """n = 3 divides nothing: the dense rest still has DDP's bits where one rank alone is not 0."""
    results = []
    for state in (None, zensync.State()):
        torch.manual_seed(3)
        model = torch.nn.Linear(50, 40)
        ddp = DistributedDataParallel(model)
        if state is not None:
            ddp.register_comm_hook(state, zensync.hook)
        values = torch.randn(4, 50) * (1.0 if rank == 1 else 0.0)
        (ddp(values) * (1.7 if rank == 1 else 0.0)).sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for stock, ours in zip(*results, strict=True):
        assert torch.equal(stock, ours)
        assert ours.any()


class Turned(torch.nn.Module):
    """Large parameters whose elements are not in the order of their rows, and one that is."""

    def __init__(self):
        super().__init__()
        self.turned = torch.nn.Parameter(torch.ones(COLUMNS, ROWS).t())
        self.conv = torch.nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.table = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
        with torch.no_grad():
            self.conv.weight.fill_(1.0)
            self.conv.bias.fill_(0.0)

    def forward(self, ids):
        image = torch.ones(1, 64, 3, 3) * (1 + ids[0])
        return self.turned[ids].sum() + self.table[ids].sum() + self.conv(image).sum()


def body_not_contiguous(rank, size):
    """Such a gradient stays in the dense rest, whatever the shape of its parameter says."""
    for bucket_view in (False, True):
        stock = train(Turned(), None, bucket_view)
        model = Turned()
        state = zensync.State()
        ours = train(model, state, bucket_view)
        compare(ours, stock, f"not contiguous, view={bucket_view}")
        assert not model.turned.grad.is_contiguous()
        assert not model.conv.weight.grad.is_contiguous()
        (name,) = state.stats()["tensors"]
        assert "[8192,16]" in name, "only the table that is contiguous was sent sparse"
        rest = 4 * (ROWS * COLUMNS + 64 * 64 * 9 + 64)
        assert state.stats()["dense_bytes"] == STEPS * rest
        state.close()


def body_errors(rank, size):
    """Refusals come by the future; ranks whose models differ get a name, not a hang."""
    state = zensync.State()
    future = zensync.hook(state, Bucket(torch.ones(3, dtype=torch.complex64)))
    with pytest.raises(RuntimeError, match=r"^(UnsupportedError: )?complex tensors"):
        future.wait()
    assert isinstance(state.last_error, zensync.UnsupportedError)
    assert state.stats()["sent_bytes"] == 0
    # DDP gives complex parameters as pairs of reals, also large ones; those work.
    big = torch.nn.Parameter(torch.full((9000, 4), 1 + 2j))
    ddp = DistributedDataParallel(Sum([big, torch.nn.Parameter(torch.ones(5) * (1 + rank))]))
    ddp.register_comm_hook(state, zensync.hook)
    ddp().backward()
    assert torch.equal(big.grad, torch.full_like(big, 1 + 1j))
    state.close()
    torch.manual_seed(1)
    model = make_model(False)
    state = zensync.State(module=None if rank else model)  # other names, so other keys
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, zensync.hook)
    with pytest.raises(RuntimeError) as caught:
        ddp(ids_of(rank, 0)).backward()
    assert isinstance(state.last_error, zensync.MismatchError), state.last_error
    assert state.last_error.message[:20] in str(caught.value)
    state.close()


class Sum(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = torch.nn.ParameterList(parts)

    def forward(self):
        return sum(
            (part.real + part.imag).sum() if part.is_complex() else part.sum()
            for part in self.parts
        )


class Bucket:
    """A bucket as a hook sees it, of a buffer that DDP does not make today."""

    def __init__(self, buffer):
        self._buffer = buffer

    def buffer(self):
        return self._buffer


def body_stock(rank, size):
    body_equals_stock(rank, size)
    body_not_contiguous(rank, size)


def test_equals_stock_ddp():
    run_ranks(2, body_stock)


def test_adapts_both_ways():
    run_ranks(2, body_adapts)


def body_three_and_errors(rank, size):
    body_three(rank, size)
    body_errors(rank, size)


def test_three_ranks_and_errors():
    run_ranks(3, body_three_and_errors)
