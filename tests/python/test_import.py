"""`import zensync` and its command line, with and without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError(f"{name} is blocked by a test")

sys.meta_path.insert(0, Block())
"""


def python(code, *arguments, env=None):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )


def test_import_needs_no_torch():
    done = python("import sys, zensync; zensync.errors.Error; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_without_torch():
    code = """
import zensync
print(zensync.__version__, zensync.MismatchError.__mro__[1].__name__)
for name in ("all_reduce", "State", "hook"):
    try:
        getattr(zensync, name)
    except ImportError as why:
        print(why)
"""
    done = python(BLOCK + code)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.endswith("Error")
    assert len(rest) == 3
    assert all("needs PyTorch" in line and "blocked by a test" in line for line in rest), rest


def test_info_without_torch():
    code = "from zensync.cli import app; app()"
    done = python(BLOCK + code, "info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["torch"] is None
    assert facts["kernels"][-1] == "ref"
    assert facts["kernels_active"] in facts["kernels"]
    assert "native" in facts["drivers"]


def test_version_without_torch():
    code = "from zensync.cli import main; main()"
    done = python(BLOCK + code, "--version")
    assert done.returncode == 0, done.stderr
    word, number = done.stdout.split()
    assert word == "zensync"
    assert f'\nversion = "{number}"\n' in (ROOT / "pyproject.toml").read_text()


def test_info_as_text():
    done = python("import runpy; runpy.run_module('zensync', run_name='__main__')", "info")
    assert done.returncode == 0, done.stderr
    assert "kernels" in done.stdout
    assert "drivers" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ZENSYNC_TRANSPORT", "carrier-pigeon", "carrier-pigeon"),
        ("ZENSYNC_CPU_TARGET", "no_such_target", "no_such_target"),
        ("ZENSYNC_VERIFY", "maybe", "maybe"),
        ("ZENSYNC_DISABLE", "yes", "yes"),
        ("ZENSYNC_TRANSPORT", "native", ""),
        ("ZENSYNC_DISABLE", "1", ""),
    ],
)
def test_info_says_what_cannot_be_had(name, value, text):
    env = {**os.environ, name: value}
    code = "from zensync.cli import main; main()"
    plain, as_json = (python(code, "info", *more, env=env) for more in ([], ["--json"]))
    for done in (plain, as_json):
        assert done.returncode == (2 if text else 0), done.stderr
        assert text in done.stderr
        assert "Traceback" not in done.stderr
    facts = json.loads(as_json.stdout)
    assert len(facts["problems"]) == (1 if text else 0)
    assert (facts["driver_active"] is None) == (value == "carrier-pigeon")
    assert plain.stdout.splitlines()[0].startswith("zensync")
    assert ("switched off" in plain.stdout) == (name == "ZENSYNC_DISABLE" and value == "1")


def test_errors_of_commands_are_one_line():
    """Also by the entry point, which is what `zensync` runs once it is installed."""
    import tomllib

    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["zensync"]
    module, function = entry.split(":")
    code = f"""
import {module} as cli
from zensync import Error

def broken():
    raise Error("it broke")

cli.collect_info = broken
cli.{function}()
"""
    done = python(code, "info")
    assert (done.returncode, done.stderr) == (2, "zensync: it broke\n")


def test_unknown_name():
    import zensync

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = zensync.no_such_name


def test_names_are_functions_in_any_order():
    code = "from zensync.ddp_hook import hook; import zensync; print(zensync.hook is hook)"
    assert python(code).stdout.split() == ["True"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mismatch", "MismatchError"),
        ("peer_lost", "PeerLostError"),
        ("deadline", "DeadlineError"),
        ("corrupt_message", "CorruptMessageError"),
        ("unsupported", "UnsupportedError"),
        ("capacity", "CapacityError"),
        ("invalid", "Error"),
        ("internal", "Error"),
    ],
)
def test_errors(kind, name):
    import zensync
    from zensync import _core

    info = _core.ErrorInfo(kind, "it broke", "weight")
    info.rank, info.culprit = 1, 2
    error = zensync.errors.make_error(info)
    assert type(error) is getattr(zensync, name)
    assert isinstance(error, zensync.Error)
    assert str(error) == 'it broke (tensor "weight", seen by rank 1, caused by rank 2)'
    assert (error.rank, error.culprit, error.tensor) == (1, 2, "weight")


@pytest.mark.parametrize(
    ("message", "tensor", "added"),
    [
        ("it broke now", "w", True),  # a part of another word does not say it
        ("it broke: w", "w", False),
        ("'a.weight' broke", "a.weight", False),
        ("it broke", None, False),
    ],
)
def test_an_error_names_its_tensor_once(message, tensor, added):
    import zensync

    assert ("tensor" in str(zensync.Error(message, tensor=tensor))) is added
