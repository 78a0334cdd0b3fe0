"""`gpu/check.sh`: what it says where there is no GPU, and that its cases can be run at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run gpu/check.sh itself")
def test_it_says_that_there_is_no_gpu():
    done = subprocess.run(
        [ROOT / "gpu" / "check.sh", sys.executable], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "no CUDA GPU here: nothing was tried" in done.stdout


@pytest.mark.slow
def test_its_cases_with_the_fake_back_end():
    done = subprocess.run(
        [sys.executable, ROOT / "gpu" / "check.py", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tensors, equal") == 5
