"""Where libraries come from (cmake/deps.cmake): installed, or a pinned source whose checksum holds.

Configures a small project of its own, header-only parts alone (no Highway, no GoogleTest), with
archives from a local folder; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

DEPS = Path(__file__).resolve().parents[2] / "cmake" / "deps.cmake"
CMAKE = shutil.which("cmake")
pytestmark = pytest.mark.skipif(
    CMAKE is None or shutil.which("g++") is None, reason="needs cmake and g++"
)

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(deps_test CXX)
option(ZENSYNC_SIMD "" OFF)
option(ZENSYNC_TESTS "" OFF)
include(deps.cmake)
message(STATUS "asio at ${ZENSYNC_ASIO_INCLUDE}")
message(STATUS "xxhash at ${ZENSYNC_XXHASH_INCLUDE}")
"""


def make_archive(path: Path, member: str) -> str:
    """A .tar.gz that holds an empty file `member`; returns its SHA-256."""
    source = path.with_suffix(".source") / member
    source.parent.mkdir(parents=True)
    source.write_text("")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(path.with_suffix(".source"), arcname="top")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def configure(folder: Path, *options: str, deps: str | None = None) -> tuple[int, str]:
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "deps.cmake").write_text(DEPS.read_text() if deps is None else deps)
    command = [str(CMAKE), "-S", str(folder), "-B", str(folder / "build"), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return run.returncode, " ".join((run.stdout + run.stderr).split())


@pytest.fixture
def mirror(tmp_path):
    folder = tmp_path / "mirror"
    folder.mkdir()
    return folder


def fill(mirror: Path) -> dict[str, str]:
    return {
        "asio": make_archive(mirror / "asio-1.30.2.tar.gz", "asio/include/asio.hpp"),
        "xxhash": make_archive(mirror / "xxhash-0.8.3.tar.gz", "xxhash.h"),
    }


def pinned(digests: dict[str, str]) -> str:
    """deps.cmake with the checksums of made archives."""
    text = DEPS.read_text()
    for name, digest in digests.items():
        pin = rf"(ZENSYNC_PIN_{name}\s+\S+\s+\S+\s+)[0-9a-f]{{64}}"
        text = re.sub(pin, rf"\g<1>{digest}", text)
    return text


def test_pinned_source_is_used(tmp_path, mirror):
    deps = pinned(fill(mirror))
    options = ("-DZENSYNC_DEPS=fetch", f"-DZENSYNC_DEPS_MIRROR={mirror}")
    code, output = configure(tmp_path, *options, deps=deps)
    assert code == 0, output
    assert f"asio at {tmp_path}/build/_deps/asio-src/asio/include" in output
    assert f"xxhash at {tmp_path}/build/_deps/xxhash-src/." in output


def test_wrong_checksum_is_refused(tmp_path, mirror):
    fill(mirror)
    options = ("-DZENSYNC_DEPS=fetch", f"-DZENSYNC_DEPS_MIRROR={mirror}")
    code, output = configure(tmp_path, *options)
    assert code != 0
    assert "does not match expected value" in output


def test_missing_archive_is_named(tmp_path, mirror):
    options = ("-DZENSYNC_DEPS=fetch", f"-DZENSYNC_DEPS_MIRROR={mirror}")
    code, output = configure(tmp_path, *options)
    assert code != 0
    assert "ZENSYNC_DEPS_MIRROR has no asio-1.30.2.tar.gz" in output


def test_installed_comes_first(tmp_path):
    header = tmp_path / "prefix" / "include"
    header.mkdir(parents=True)
    (header / "asio.hpp").write_text("")
    (header / "xxhash.h").write_text("")
    options = ("-DZENSYNC_DEPS=system", f"-DCMAKE_PREFIX_PATH={tmp_path}/prefix")
    code, output = configure(tmp_path, *options)
    assert code == 0, output
    assert f"asio at {header}" in output


def test_system_only_fetches_nothing(tmp_path, mirror):
    fill(mirror)
    options = ("-DZENSYNC_DEPS=system", f"-DZENSYNC_DEPS_MIRROR={mirror}")
    nowhere = ("-DCMAKE_FIND_ROOT_PATH=/nonexistent", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY")
    code, output = configure(tmp_path, *options, *nowhere)
    assert code != 0
    assert "asio is not installed and ZENSYNC_DEPS=system fetches nothing" in output


def test_unknown_choice_is_refused(tmp_path):
    code, output = configure(tmp_path, "-DZENSYNC_DEPS=maybe")
    assert code != 0
    assert "must be auto, system or fetch" in output
