"""A wheel built from this tree, in a fresh environment without torch, used from outside the tree.

The build reuses `build/python`, as `make setup` does, so that only what changed is compiled. NumPy,
Typer and Rich come from the package registry, in the versions of requirements-dev.txt.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("scikit_build_core", reason="needs what a build without isolation needs")

ROOT = Path(__file__).resolve().parents[2]
NO_REGISTRY = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError")
LOADED = """
import zensync._core
lines = open("/proc/self/maps").read().splitlines()
print(*sorted({line.split()[-1] for line in lines if "libhwy" in line}))
"""


class Installed(NamedTuple):
    """An environment with the wheel in it."""

    folder: Path
    wheel: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, in a folder outside the tree."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ZENSYNC_"))}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder, env=kept, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    @property
    def package(self) -> Path:
        return next(self.folder.glob("lib/python3.*/site-packages/zensync"))

    @property
    def bundled(self) -> list[Path]:
        """Copies of Highway's shared library in the wheel; none where it is linked statically."""
        names = zipfile.ZipFile(self.wheel).namelist()
        return [self.package.parent / name for name in names if "libhwy" in name]

    def loaded(self) -> list[Path]:
        done = self.run("python", "-c", LOADED)
        return [Path(path) for path in done.stdout.split()]


def pip(*arguments: str) -> None:
    beside = Path(sys.executable).parent  # cmake and ninja
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        cwd=ROOT, env=os.environ | {"PATH": f"{beside}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode != 0 and NO_REGISTRY.search(done.stdout + done.stderr):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = ("--no-build-isolation", "--no-deps", "-C", "build-dir=build/python")
    pip("wheel", ".", *build, "-w", str(folder))
    (wheel,) = folder.glob("zensync-*.whl")
    fresh = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    versions = ("-c", "requirements-dev.txt")
    pip("--python", str(fresh / "bin" / "python"), "install", "-q", *versions, str(wheel))
    return Installed(fresh, wheel)


def test_imports(installed):
    done = installed.run("python", "-c", "import zensync; print(zensync.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == installed.package


def test_version(installed):
    done = installed.run("zensync", "--version")
    assert done.returncode == 0, done.stderr
    assert f"-{done.stdout.split()[1]}-" in installed.wheel.name


def test_info(installed):
    done = installed.run("zensync", "info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["torch"] is None
    assert facts["kernels_active"] == facts["kernels"][0]
    assert "native" in facts["drivers"]
    assert installed.run("zensync", "info").returncode == 0


@pytest.mark.parametrize("name", ["State", "all_reduce", "hook"])
def test_what_needs_torch_says_so(installed, name):
    done = installed.run("python", "-c", f"import zensync; zensync.{name}")
    assert done.returncode == 1
    assert f"ImportError: zensync.{name} needs PyTorch" in done.stderr


def test_the_demo_says_what_it_needs(installed):
    done = installed.run("zensync", "demo")
    assert done.returncode == 2
    assert "torch" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_the_core_works(installed):
    code = "import numpy, zensync._core as c; ones = numpy.ones(9, numpy.float32); " \
        "print(c.loopback_sum([ones, ones], {})['results'][1].tolist())"  # fmt: skip
    done = installed.run("python", "-c", code)
    assert done.stdout.strip() == str([2.0] * 9), done.stderr


def test_the_bundled_library_is_the_one_that_is_loaded(installed):
    assert installed.loaded() == installed.bundled


def test_control_a_missing_library_is_found(installed):
    if not installed.bundled:
        pytest.skip("Highway is linked statically: nothing is bundled")
    (library,) = installed.bundled
    away = library.with_name("away")
    library.rename(away)
    try:
        assert installed.loaded() != installed.bundled
    finally:
        away.rename(library)


def test_the_wheel_holds_licences_and_no_tests(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert not [name for name in names if re.search(r"(^|/)tests?(/|_)", name)]
