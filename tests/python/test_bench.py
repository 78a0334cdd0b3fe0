"""`zensync bench`: targets are judged, and a missed one is an exit status."""

import math
import subprocess
import sys

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


def test_results_that_were_written_do_not_make_another_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert result.commit() == ""
    results = tmp_path / "bench/results"
    results.mkdir(parents=True)
    (results / "old.json").write_text("1")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = result.commit()
    assert len(clean) >= 7
    (results / "old.json").write_text("2")
    (results / "more.json").write_text("3")
    monkeypatch.chdir(results)
    assert result.commit() == clean
    (tmp_path / "code.py").write_text("4")
    assert result.commit() == clean + "+"
