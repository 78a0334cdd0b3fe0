"""`zensync.observe`: figures against NumPy, verdicts, nothing touched.

Bytes are in test_observe_bytes.py, odd cases in test_observe_cases.py.
"""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from zensync._observe import find_rows

ROWS, COLUMNS, BATCH, STEPS = 4096, 64, 512, 4
VERDICTS = {
    "table": "use zensync",
    "functional": "use zensync",
    "tied.weight": "leave it: tied to a dense output layer",
    "wide.weight": "leave it: dense",
    "small.weight": "leave it: small",
    "frozen.weight": "leave it: frozen",
    "lora_a": "leave it: small (a low-rank adapter)",
    "lora_b": "leave it: dense (a low-rank adapter)",
}


class Model(torch.nn.Module):
    """Tables dense-stored, COO, functional, tied, frozen; dense and small layers; an adapter."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS)
        self.coo = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
        self.functional = torch.nn.Parameter(torch.randn(ROWS, COLUMNS))
        self.tied = torch.nn.Embedding(ROWS, COLUMNS)
        self.wide = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.small = torch.nn.Linear(COLUMNS, 4)
        self.lora_a = torch.nn.Parameter(torch.randn(COLUMNS, 4))
        self.lora_b = torch.nn.Parameter(torch.randn(4, ROWS))
        self.out = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.out.weight = self.tied.weight
        self.frozen = torch.nn.Embedding(ROWS, COLUMNS).requires_grad_(False)

    def forward(self, ids):
        found = torch.nn.functional.embedding(ids, self.functional)
        rows = self.table(ids) + self.coo(ids) + found + self.tied(ids) + self.frozen(ids)
        changed = self.wide(rows) + rows @ self.lora_a @ self.lora_b
        return (self.out(rows) + changed).pow(2).mean() + self.small(rows).pow(2).mean()


def ids_of(rank, step):
    draw = np.random.default_rng(100 * step + rank)
    return np.minimum(draw.zipf(1.3, BATCH) - 1, ROWS - 1)


def train(rank, watch, seen=None):
    """(losses and last parameters as bytes, observation)."""
    torch.manual_seed(1)
    module = Model()
    ddp = DistributedDataParallel(module)
    if watch:
        seen = zensync.observe(ddp, STEPS, rate="200mbit")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = ddp(torch.from_numpy(ids_of(rank, step)))
        loss.backward()
        losses.append(loss.detach().numpy().tobytes())
        optimizer.step()
    bits = [p.detach().numpy().tobytes() for p in module.parameters()]
    return [*losses, *bits], seen


def oracle(size, steps):
    """Mean (density, union density, densification, skewness) of a table that `ids` index."""
    rows = []
    for step in range(steps):
        masks = np.zeros((size, ROWS), dtype=bool)
        for rank in range(size):
            masks[rank, ids_of(rank, step)] = True
        density, union = masks.mean(), masks.any(axis=0).mean()
        skews = []
        for mask in masks:
            parts = [mask[ROWS * k // size : ROWS * (k + 1) // size] for k in range(size)]
            skews.append(max(part.mean() for part in parts) / mask.mean())
        rows.append((density, union, union / density, np.mean(skews)))
    return np.mean(rows, axis=0)


def observe_body(rank, size):
    with_it, seen = train(rank, True)
    without, _ = train(rank, False)
    assert seen.is_done
    assert seen.error is None
    return with_it == without, seen.report(), str(seen)


@pytest.fixture(scope="module", params=(2, 3))
def observed(request):
    return request.param, run_ranks(request.param, observe_body)


def row_named(report, name):
    return next(row for row in report["parameters"] if row["name"] in (name, f"{name}.weight"))


def test_nothing_is_touched(observed):
    assert all(same for same, *_ in observed[1])


def test_figures_are_exact_and_equal_on_all_ranks(observed):
    size, results = observed
    report = results[0][1]
    assert all(json.dumps(one) == json.dumps(report) for _, one, *_ in results)
    assert report["steps"] == STEPS
    expected = oracle(size, STEPS)
    assert abs(expected - oracle(size, STEPS - 1)).max() > 1e-6  # it tells one step more or less
    for name in ("table", "coo", "functional"):
        row = row_named(report, name)
        keys = ("density", "union_density", "densification", "skewness")
        np.testing.assert_allclose([row[key] for key in keys], expected, rtol=1e-9)
    assert row_named(report, "coo")["layout"] == "coo"
    assert row_named(report, "table")["layout"] == "dense"


def test_verdicts(observed):
    report = observed[1][0][1]
    for name, words in VERDICTS.items():
        assert row_named(report, name)["verdict"] == words, name
    names = [row["name"] for row in report["parameters"]]
    assert names.count("tied.weight") == 1
    assert "out.weight" not in names
    assert report["saved_ms"] > 0
    text = observed[1][0][2]
    assert "use zensync" in text
    assert "1 frozen" in text
    assert "frozen.weight" not in text


def test_bytes_of_today(observed):
    size, results = observed
    report = results[0][1]
    ring = 2 * (size - 1) / size * ROWS * COLUMNS * 4
    assert row_named(report, "table")["now_bytes"] == pytest.approx(ring)
    gathered = []
    for step in range(STEPS):
        blocks = [72 + (8 + 4 * COLUMNS) * np.unique(ids_of(r, step)).size for r in range(size)]
        sent = [sum(blocks) - blocks[(r + 1) % size] for r in range(size)]
        received = [sum(blocks) - blocks[r] for r in range(size)]
        gathered.append([sent, received])
    busiest = np.mean(gathered, axis=0).max()
    assert row_named(report, "coo")["now_bytes"] == pytest.approx(busiest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_non_zero_is_a_matter_of_bits(dtype):
    gradient = torch.zeros(5, 2, dtype=dtype)
    gradient[1, 0] = -0.0
    gradient[2] = torch.tensor([1.0, -1.0])
    gradient[3, 1] = float("nan")
    gradient[4, 0] = torch.finfo(dtype).smallest_normal / 2
    torch.set_flush_denormal(True)
    try:
        rows, elements = find_rows(gradient, 5)
        assert rows.tolist() == [False, False, True, True, True]
        assert elements == 4
    finally:
        torch.set_flush_denormal(False)


def test_one_rank_without_a_group():
    assert not dist.is_initialized()
    module = torch.nn.Embedding(ROWS, COLUMNS)
    seen = zensync.observe(module, 2)
    for _ in range(3):
        module(torch.arange(8)).sum().backward()
    assert seen.is_done
    assert seen.steps == 2
    assert seen.report()["parameters"][0]["verdict"] == "leave it: one rank"
    json.dumps(seen.report())
    assert "one rank" in str(seen)
    assert zensync.observe(module).report()["parameters"] == []


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("steps=", {"steps": 0}),
        ("steps=", {"steps": True}),
        ("rate=", {"rate": "fast"}),
        ("rate=", {"rate": 5}),
        ("hosts=", {"hosts": ["a", "b"]}),
        ("Module", {"model": 3}),
        ("no parameter", {"model": torch.nn.ReLU()}),
        ("lazy", {"model": torch.nn.LazyLinear(3)}),
        ("memory", {"model": torch.nn.Linear(3, 3, device="meta")}),
    ],
)
def test_bad_input(words, given):
    with pytest.raises(zensync.Error, match=words):
        zensync.observe(**{"model": torch.nn.Linear(3, 3), **given})
