"""`examples/zero/train.py` under torchrun: its losses are, bit for bit, those of one process with
the whole table, and it sends a fraction of the table.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


@pytest.fixture
def dense(capsys):
    """The losses of one process with the whole table in place of `ranks`."""
    spec = importlib.util.spec_from_file_location("zero_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def run_dense(ranks):
        threads = torch.get_num_threads()
        example.main(["--dense", str(ranks), "--steps", str(STEPS)])
        torch.set_num_threads(threads)
        return losses(capsys.readouterr().out)

    return run_dense


def losses(text):
    found = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", text, re.MULTILINE)]
    assert len(found) == STEPS, text
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(2, "rows"), (4, "rows"), (4, "columns")])
def test_losses_are_those_of_the_whole_table(dense, ranks, layout):
    wanted = dense(ranks)
    text = sharded(ranks, "--layout", layout)
    assert losses(text) == wanted
    assert min(wanted[1:]) < wanted[0], "it learns"
    assert dense(ranks + 1) != wanted, "the control: other batches have other losses"
    sent = [int(count) for count in re.findall(r"sent (\d+) B", text)]
    whole = int(re.findall(r"without zensync: (\d+) B", text)[0])
    assert all(0 < count < whole / 4 for count in sent), text
    if layout == "columns":
        assert text.count("imbalance 1.00") == 2, text


def test_without_zensync(dense):
    found = losses(sharded(2, ZENSYNC_DISABLE="1"))
    assert found == pytest.approx(dense(2), rel=1e-4)
