"""`examples/zero/train.py` under torchrun: its losses are, bit for bit, those of one process with
the whole table, and it sends a fraction of the table.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zensync
from ranks import RESOLVER, free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "zero" / "train.py"
STEPS = 4


def run(*command, **env):
    package = str(Path(zensync.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, **RESOLVER, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def sharded(ranks, *options, **env):
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    port = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    return run(*launch, *port, str(EXAMPLE), "--steps", str(STEPS), *options, **env)


def losses(text):
    found = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", text, re.MULTILINE)]
    assert len(found) == STEPS, text
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_losses_are_those_of_the_whole_table(ranks, layout):
    dense = losses(run(str(EXAMPLE), "--dense", str(ranks), "--steps", str(STEPS)))
    text = sharded(ranks, "--layout", layout)
    assert losses(text) == dense
    assert dense[-1] < dense[0], "it learns"
    other = losses(run(str(EXAMPLE), "--dense", str(ranks + 1), "--steps", str(STEPS)))
    assert other != dense, "the control: other batches have other losses"
    sent = [int(count) for count in re.findall(r"sent (\d+) B", text)]
    whole = int(re.findall(r"without zensync: (\d+) B", text)[0])
    assert all(0 < count < whole / 4 for count in sent), text
    if layout == "columns":
        assert text.count("imbalance 1.00") == 2, text


def test_without_zensync():
    dense = losses(run(str(EXAMPLE), "--dense", "2", "--steps", str(STEPS)))
    found = losses(sharded(2, ZENSYNC_DISABLE="1"))
    assert found == pytest.approx(dense, rel=1e-4)
