"""`zensync.observe`: figures against NumPy, nothing touched, bytes against what the hook sends."""

import json
import os
import subprocess
import sys

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
    "adapter.weight": "leave it: small",
    "never": "leave it: no gradient",
}


class Model(torch.nn.Module):
    """Tables dense-stored, COO and functional; a tied one; a dense and a small layer."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS)
        self.coo = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
        self.functional = torch.nn.Parameter(torch.randn(ROWS, COLUMNS))
        self.tied = torch.nn.Embedding(ROWS, COLUMNS)
        self.wide = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.adapter = torch.nn.Linear(COLUMNS, 4)
        self.out = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.out.weight = self.tied.weight
        self.frozen = torch.nn.Embedding(ROWS, COLUMNS).requires_grad_(False)

    def forward(self, ids):
        found = torch.nn.functional.embedding(ids, self.functional)
        rows = self.table(ids) + self.coo(ids) + found + self.tied(ids) + self.frozen(ids)
        return (self.out(rows) + self.wide(rows)).pow(2).mean() + self.adapter(rows).pow(2).mean()


def ids_of(rank, step):
    draw = np.random.default_rng(100 * step + rank)
    return np.minimum(draw.zipf(1.3, BATCH) - 1, ROWS - 1)


def train(rank, size, watch, use_hook=False, steps=STEPS):
    """(losses and last gradients as bytes, observation, exchange bytes of each step)."""
    torch.manual_seed(1)
    module = Model()
    ddp = DistributedDataParallel(module)
    seen = zensync.observe(ddp, STEPS, rate="200mbit") if watch else None
    state = zensync.State(module=module) if use_hook else None
    if use_hook:
        ddp.register_comm_hook(state, zensync.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses, sent = [], [0]
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(torch.from_numpy(ids_of(rank, step)))
        loss.backward()
        losses.append(loss.detach().numpy().tobytes())
        optimizer.step()
        if use_hook:
            sent.append(max(state.stats()[f"{way}_bytes"] for way in ("sent", "received")))
    if use_hook:
        state.close()
    bits = [p.detach().numpy().tobytes() for p in module.parameters()]
    return [*losses, *bits], seen, np.diff(sent)


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
    with_it, seen, _ = train(rank, size, True)
    without, _, _ = train(rank, size, False)
    _, _, sent = train(rank, size, False, use_hook=True)
    assert seen.is_done
    assert seen.error is None
    text = str(seen)
    return with_it == without, seen.report(), sent.tolist(), text


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
        if name != "never":
            assert row_named(report, name)["verdict"] == words, name
    names = [row["name"] for row in report["parameters"]]
    assert names.count("tied.weight") == 1
    assert "out.weight" not in names
    assert not any("frozen" in name for name in names)
    assert report["saved_ms"] > 0
    assert "use zensync" in observed[1][0][3]


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
        gathered.append(max(*sent, *received))
    assert row_named(report, "coo")["now_bytes"] == pytest.approx(np.mean(gathered))


def bytes_body(rank, size):
    """Two tables, the same rows in each step, so that counts are known from the second on."""
    torch.manual_seed(1)
    tables = {"table": torch.nn.Embedding(ROWS, COLUMNS)}
    tables["coo"] = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    module = Tables(torch.nn.ModuleDict(tables))
    ddp = DistributedDataParallel(module)
    seen = zensync.observe(ddp, STEPS)
    state = zensync.State(module=module)
    ddp.register_comm_hook(state, zensync.hook)
    sent = []
    for _ in range(STEPS):
        ddp(torch.from_numpy(ids_of(rank, 0))).backward()
        ddp.zero_grad()
        stats = state.stats()
        sent.append(max(stats["sent_bytes"], stats["received_bytes"]))
    state.close()
    return seen.report(), sent[-1] - sent[-2]


class Tables(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, ids):
        return sum(table(ids).pow(2).sum() for table in self.tables.values())


@pytest.mark.parametrize("size", [2, 3])
def test_predicted_bytes_are_those_that_are_sent(size):
    results = run_ranks(size, bytes_body)
    predicted = sum(row["exchange_bytes"] for row in results[0][0]["parameters"])
    sent = max(sent for _, sent in results)
    assert predicted == pytest.approx(sent, rel=0.05)
    assert predicted != pytest.approx(sent / 2, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_non_zero_is_a_matter_of_bits(dtype):
    gradient = torch.zeros(5, 2, dtype=dtype)
    gradient[1, 0] = -0.0
    gradient[2] = torch.tensor([1.0, -1.0])
    gradient[3, 1] = float("nan")
    gradient[4, 0] = torch.finfo(dtype).smallest_normal / 2
    torch.set_flush_denormal(True)
    try:
        assert find_rows(gradient, 5).tolist() == [False, False, True, True, True]
    finally:
        torch.set_flush_denormal(False)


def uneven_body(rank, size):
    """Plain modules: a table that one rank alone uses; fewer steps than asked; another order."""
    one = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    two = torch.nn.Embedding(ROWS, COLUMNS)
    both = torch.nn.ModuleList([one, two])
    seen = zensync.observe(both, 5, hosts=[0, 0])
    ids = torch.arange(8)
    (two(ids).sum() if rank else one(ids[:4]).sum() + two(ids).sum()).backward()
    seen.close()
    seen.close()
    two(ids).sum().backward()
    report = seen.report()
    try:
        zensync.observe(both if rank else one, 5)
        refused = ""
    except zensync.MismatchError as why:
        refused = str(why)
    return report, refused


def test_a_rank_without_a_gradient_counts_nothing():
    for report, refused in run_ranks(2, uneven_body):
        one, two = report["parameters"]
        assert report["steps"] == 1
        assert one["density"] == 2 / ROWS
        assert two["density"] == two["union_density"] == 8 / ROWS
        assert report["now_bytes"] == 0  # one host: no card carries anything
        assert report["rate_bits_per_s"] > 0
        assert "differ" in refused


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


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
if "ddp" in sys.argv:
    dist.init_process_group("gloo")
table = torch.nn.Embedding(8192, 16)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
model = DistributedDataParallel(table) if "ddp" in sys.argv else table
for step in range(3 * ("idle" not in sys.argv)):
    optimizer.zero_grad()
    model(torch.arange(32)).sum().backward()
    optimizer.step()
print("trained", sys.argv[1:])
if "ddp" in sys.argv:
    dist.destroy_process_group()
if "fail" in sys.argv:
    sys.exit(7)
"""


def command(folder, *args, launcher=()):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    own = [str(script) if one == "SCRIPT" else one for one in args]
    argv = [sys.executable, *launcher, "-m", "zensync", "observe", *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)


def test_the_command_under_torchrun(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    where = tmp_path / "out.json"
    options = ("--steps", "2", "--rate", "200mbit", "--json", str(where))
    ended = command(tmp_path, *options, "SCRIPT", "ddp", "--lr", "1", launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained ['ddp', '--lr', '1']") == 2
    assert "verdict" not in ended.stdout
    assert ended.stderr.count("zensync observe: 2 steps, 2 ranks") == 1
    report = json.loads(where.read_text())
    assert report["parameters"][0]["density"] == 32 / 8192
    assert report["verdict"] == "use zensync: for weight"


def test_the_command_alone(tmp_path):
    ended = command(tmp_path, "--json", "-", "SCRIPT", "fail")
    assert ended.returncode == 7
    head, _, rest = ended.stdout.partition("\n")
    assert head == "trained ['fail']"
    assert json.loads(rest)["steps"] == 2  # the first came before it was known what is trained


def test_the_command_when_there_is_nothing_to_see(tmp_path):
    ended = command(tmp_path, "SCRIPT", "idle")
    assert ended.returncode == 3
    assert ended.stderr.strip().splitlines()[-1].startswith("zensync observe: nothing was trained")
    ended = command(tmp_path, str(tmp_path / "none.py"))
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
