"""`zensync bench`: targets are judged, and a missed one is an exit status."""

import json
import math
import shutil
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
from zensync import _core, bench
from zensync.bench import kernels, result, volumes
from zensync.bench.result import Table
from zensync.demo import data


@pytest.mark.parametrize(
    ("pairs", "least", "met"),
    [
        ([(1.0, 3.0), (1.0, 4.0), (1.0, 9.0)], 4.0, True),
        ([(1.0, 3.0), (1.0, 3.9), (1.0, 9.0)], 4.0, False),
        ([(1.0, 3.0)], None, None),
        ([(1.0, math.nan)], 4.0, None),
    ],
)
def test_a_row_is_judged_by_the_median(pairs, least, met):
    row = kernels._row("copy", pairs, "memcpy", least)
    assert row["met"] is met
    assert row["target"] == ("–" if least is None else "≥ 4")


@pytest.mark.parametrize(("met", "status"), [(True, 0), (None, 0), (False, 1)])
def test_check_fails_if_a_target_is_missed(monkeypatch, capsys, met, status):
    tables = [Table("one", [{"met": True}, {"met": met}])]
    monkeypatch.setattr(bench, "_measure", lambda options: tables)
    for arguments, expected in ((["--check"], status), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["zensync bench", "--bytes", *arguments])
        assert bench.main() == expected
    assert "one" in capsys.readouterr().out


@pytest.mark.parametrize("real", [True, False])
def test_only_real_tokens_are_judged(monkeypatch, tmp_path, real):
    tokens = data.numpy.arange(3 * volumes._TOKENS, dtype=data.numpy.int32) % 5000
    path = tmp_path / ("corpus.npy" if real else "substitute.npy")
    data.numpy.save(path, tokens)
    corpus = data.Corpus(str(path), tokens.size, 5000, "made")
    assert corpus.is_real is real
    monkeypatch.setattr(data, "prepare", lambda *_, **__: corpus)
    rows = volumes._tokens(str(tmp_path), True)
    assert [row["met"] is None for row in rows] == [not real] * 2
    assert all(("substitute" in row["target"]) is not real for row in rows)


@pytest.mark.parametrize(("parts", "width"), [(1, 64), (4, 16), (64, 1)])
def test_parts_of_a_row_can_be_fixed(parts, width):
    rows = np.zeros((1000, 64), dtype=np.float32)
    rows[::50] = 1
    options = {"scheme": "balanced", "name": "table", "parts": parts, "steps": 2}
    result = _core.loopback_sum([rows, rows, rows], options)
    assert [report["width"] for report in result["reports"]] == [width] * 3
    assert (result["results"][0] == 3 * rows).all()


GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]


def made_tree(folder):
    """A source tree with a commit, and a measurement's old results."""
    for place in ("python/zensync/bench", "bench/results"):
        (folder / place).mkdir(parents=True)
    (folder / "pyproject.toml").write_text("")
    (folder / "python/zensync/bench/result.py").write_text("1")
    (folder / "bench/results/old.json").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *words], check=True, cwd=folder)
    return folder


def test_results_that_were_written_do_not_make_another_commit(tmp_path, monkeypatch):
    tree = made_tree(tmp_path)
    monkeypatch.setattr(result, "_PACKAGE", tree / "python/zensync")
    clean = result.commit()
    assert len(clean) >= 7
    (tree / "bench/results/old.json").write_text("2")
    (tree / "bench/results/more.json").write_text("3")
    assert result.commit() == clean
    (tree / "code.py").write_text("4")
    assert result.commit() == clean + "+"


def test_the_commit_is_that_of_the_tree_zensync_was_installed_from(tmp_path, monkeypatch):
    tree, other = made_tree(tmp_path / "a tree"), made_tree(tmp_path / "other")
    (other / "more").write_text("2")
    monkeypatch.chdir(other)  # somebody else's repository, where zensync is used
    package = other / "venv/site-packages/zensync"
    shutil.copytree(tree / "python/zensync", package)
    monkeypatch.setattr(result, "_PACKAGE", package)
    distribution = metadata.PathDistribution(tmp_path)
    monkeypatch.setattr(metadata.Distribution, "from_name", lambda _: distribution)

    def commit_from(url: str) -> str:
        (tmp_path / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {}}))
        return result.commit()

    head = subprocess.run([*GIT, "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True)
    short = head.stdout.decode().strip()
    assert commit_from(tree.as_uri()) == short
    (package / "bench/result.py").write_text("the tree has gone on since")
    assert commit_from(tree.as_uri()) == short + "+"
    assert commit_from("https://example.org/zensync-0.1.0.whl") == ""
    assert commit_from((tmp_path / "gone").as_uri()) == ""


def test_a_tree_without_a_repository_of_its_own_has_no_commit(tmp_path, monkeypatch):
    made_tree(tmp_path)
    inside = tmp_path / "vendored"
    shutil.copytree(tmp_path / "python", inside / "python")
    (inside / "pyproject.toml").write_text("")
    monkeypatch.setattr(result, "_PACKAGE", inside / "python/zensync")
    assert result.commit() == ""
