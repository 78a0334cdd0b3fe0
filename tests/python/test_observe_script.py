"""`zensync observe script.py …` as a user runs it: alone, under torchrun, and against zensync."""

import json
import os
import subprocess
import sys

import pytest

# Skip-gram with negative samples on a Zipf text; `--zensync` trains it with zensync in place.
TRAINING = """
import argparse, json, sys
import numpy as np, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

given = argparse.ArgumentParser()
given.add_argument("--steps", type=int, default=8)
given.add_argument("--zensync", action="store_true")
given = given.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
VOCABULARY, WIDTH, PAIRS = 6000, 32, 256


class SkipGram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.contexts = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.project = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, word, context, other):
        words = self.project(self.words(word))
        near = (words * self.contexts(context)).sum(-1)
        far = torch.einsum("bd,bkd->bk", words, self.contexts(other))
        return -(torch.nn.functional.logsigmoid(near).mean()
                 + torch.nn.functional.logsigmoid(-far).sum(-1).mean())


draw = np.random.default_rng(7)
text = np.minimum(draw.zipf(1.2, 1 << 18) - 1, VOCABULARY - 1)
model = DistributedDataParallel(SkipGram())
if given.zensync:
    import zensync
    state = zensync.attach(model)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
marks = []
for step in range(given.steps):
    at = np.random.default_rng(100 * step + rank).integers(0, len(text) - 1, PAIRS)
    others = np.random.default_rng(100 * step + rank + 50).choice(text, (PAIRS, 2))
    optimizer.zero_grad()
    loss = model(*(torch.from_numpy(it) for it in (text[at], text[at + 1], others)))
    loss.backward()
    optimizer.step()
    if rank == 0:
        print("loss", step, loss.item().hex(), flush=True)
    if given.zensync:
        stats = state.stats()
        marks.append([stats["sent_bytes"], stats["received_bytes"], stats["dense_bytes"]])
if given.zensync:
    counted = [(last - first) / 4 for last, first in zip(marks[-1], marks[-5])]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counted)
    if rank == 0:
        print("counted", json.dumps(everyone))
    state.close()
dist.destroy_process_group()
"""

# Two models, as `ddp` or plain ones; it can end badly, or do nothing.
SMALL = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
if "ddp" in sys.argv:
    dist.init_process_group("gloo")
tables = [torch.nn.Embedding(8192, 16) for _ in range(2)]
models = [DistributedDataParallel(one) for one in tables] if "ddp" in sys.argv else tables
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in tables]
for step in range(3 * ("idle" not in sys.argv)):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        model(torch.arange(32)).sum().backward()
        optimizer.step()
print("trained", sys.argv[1:])
if "ddp" in sys.argv:
    dist.destroy_process_group()
if "fail" in sys.argv:
    sys.exit(7)
if "raise" in sys.argv:
    raise ValueError("on purpose")
"""


def run(folder, text, *args, ranks=0, observe=()):
    """The script, under torchrun if `ranks`; through the command if `observe` has its options."""
    script = folder / "script.py"
    script.write_text(text)
    argv = [sys.executable]
    if ranks:
        argv += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    if observe:
        argv += ["-m", "zensync", "observe", *observe]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv += [str(script), *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=150, env=environment)


def lines(ended, word):
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line.startswith(word)]


def test_a_real_script_against_what_zensync_then_sends(tmp_path):
    where = tmp_path / "out.json"
    options = ("--steps", "8", "--rate", "200mbit", "--json", str(where))
    plain = run(tmp_path, TRAINING, ranks=3)
    observed = run(tmp_path, TRAINING, ranks=3, observe=options)
    changed = run(tmp_path, TRAINING, "--zensync", ranks=3)
    assert len(lines(plain, "loss")) == 8
    assert lines(plain, "loss") == lines(observed, "loss")
    (report,) = json.loads(where.read_text())["observations"]
    (line,) = lines(changed, "counted")
    counted = json.loads(line.removeprefix("counted"))
    sent = max(max(one[:2]) for one in counted)
    print(f"BYTES script n=3: predicted {report['exchange_bytes']:.0f}, sent {sent:.0f}: "
          f"{report['exchange_bytes'] / sent - 1:+.3%}; dense {report['dense_bytes']:.0f}, "
          f"{counted[0][2]:.0f}")  # fmt: skip
    assert report["exchange_bytes"] == pytest.approx(sent, rel=0.05)
    assert report["dense_bytes"] == counted[0][2]
    assert report["verdict"].startswith("use zensync: for words.weight, contexts.weight")
    assert report["steps"] == 8


def test_each_ddp_is_observed(tmp_path):
    where = tmp_path / "out.json"
    options = ("--steps", "2", "--rate", "200mbit", "--hosts", "a,a", "--json", str(where))
    ended = run(tmp_path, SMALL, "ddp", "--lr", "1", ranks=2, observe=options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained ['ddp', '--lr', '1']") == 2
    assert "verdict" not in ended.stdout
    assert ended.stderr.count("zensync observe: 2 steps, 2 ranks") == 2
    reports = json.loads(where.read_text())["observations"]
    assert [one["parameters"][0]["density"] for one in reports] == [32 / 8192] * 2
    assert reports[0]["now_bytes"] == 0  # one host


@pytest.mark.parametrize(("word", "status"), [("fail", 7), ("raise", 1)])
def test_its_own_exit_status_comes_first(tmp_path, word, status):
    ended = run(tmp_path, SMALL, word, observe=("--json", "-"))
    assert ended.returncode == status
    head, _, rest = ended.stdout.partition("\n")
    assert head == f"trained ['{word}']"
    (report,) = json.loads(rest)["observations"]
    assert report["steps"] == 2  # the first came before it was known what is trained
    assert ("on purpose" in ended.stderr) == (word == "raise")


def test_when_there_is_nothing_to_see(tmp_path):
    ended = run(tmp_path, SMALL, "idle", observe=("--rate", "1gbit"))
    assert ended.returncode == 3
    assert ended.stderr.strip().splitlines()[-1].startswith("zensync observe: nothing was trained")
    ended = run(tmp_path, SMALL, observe=("--steps", "0"))
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
