"""The demo, tiny: two ranks on loopback, text that is always there; and its judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the demo trains with torch")

from zensync.demo import data, report  # noqa: E402
from zensync.demo.config import MODES, Config, ModeResult, Options, RankResult  # noqa: E402
from zensync.demo.launcher import run_demo  # noqa: E402
from zensync.demo.model import Batches, SkipGram  # noqa: E402
from zensync.lab.slow_net import why_not  # noqa: E402

JSON_KEYS = {
    "mode",
    "loss",
    "steps_per_s",
    "wire_bytes",
    "wire_bytes_tables",
    "sync_s",
    "bitwise_equal",
    "network",
}
SETTING = report.Setting("loopback", "as asked", "made up", 0.0)
COUNTERS = "interface counters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def tiny(folder, tmp_path) -> Options:
    return Options(
        ranks=2,
        steps=6,
        network="loopback",
        json_file=tmp_path / "demo.json",
        data=folder,
        dim=8,
        negatives=8,
        tokens_per_rank=512,
        offline=True,
        timeout_s=120.0,
    )


def test_all_modes_train_alike(tiny, capfd):
    status = run_demo(tiny)
    shown = capfd.readouterr()
    assert status == 0, shown.out + shown.err
    runs = json.loads(tiny.json_file.read_text())
    assert [run["mode"] for run in runs] == list(MODES)
    assert all(run.keys() >= JSON_KEYS for run in runs)
    by_mode = {run["mode"]: run for run in runs}
    assert all(run["bitwise_equal"] for run in runs)
    assert all(run["network"] == "loopback" for run in runs)
    assert by_mode["zensync"]["loss"] == pytest.approx(by_mode["dense"]["loss"], rel=1e-4)
    assert 0 < by_mode["zensync"]["wire_bytes"] < by_mode["dense"]["wire_bytes"]
    assert by_mode["dense"]["wire_bytes_by"] == "computed"
    assert "zensync" in shown.out
    assert "loopback" in shown.out
    assert "standard library" in shown.out


@pytest.mark.skipif(why_not() is not None, reason=f"a slow-link network {why_not()}")
def test_computed_bytes_are_those_that_cards_count(tiny):
    # Large enough that the headers of packets and of torch's own messages are small beside it.
    tiny = replace(tiny, modes=("dense", "sparse"), dim=64, tokens_per_rank=4096, steps=4)
    status = run_demo(replace(tiny, network="slow"))
    counted = json.loads(tiny.json_file.read_text())
    assert status == 0
    run_demo(tiny)
    computed = json.loads(tiny.json_file.read_text())
    for ours, theirs in zip(computed, counted, strict=True):
        assert theirs["network"] == "slow 200mbit"
        assert theirs["wire_bytes_by"] == COUNTERS
        # The cards' busiest rank may hold more rows than the mean, which is what is computed.
        assert 1 < theirs["wire_bytes_tables"] / ours["wire_bytes_tables"] < 1.2


def test_what_takes_too_long_is_stopped(tiny, capfd):
    assert run_demo(replace(tiny, timeout_s=0.5)) == 2
    assert "not done after" in capfd.readouterr().err


def test_ranks_end_with_a_killed_launcher(folder):
    command = [sys.executable, "-m", "zensync.demo", "--offline", "--data", str(folder)]
    command += ["--ranks", "2", "--network", "loopback", "--steps", "1000"]
    launcher = subprocess.Popen(
        command,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(folder)},  # a killed one can't empty it
    )
    children: list[int] = []
    try:
        listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        deadline = time.monotonic() + 30
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            children = [int(pid) for pid in listed.read_text().split()]
    finally:
        launcher.kill()
        launcher.wait()
    assert len(children) == 2
    deadline = time.monotonic() + 15
    while any(map(_is_rank, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_rank, children))


def _is_rank(pid: int) -> bool:
    try:
        return b"zensync.demo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 1}, {"steps": 2}, {"network": "moon"}, {"modes": ("dense", "denser")},
        {"rate": "fast"}, {"timeout_s": float("nan")}, {"timeout_s": 0.0},
    ],
)  # fmt: skip
def test_impossible_wishes_are_refused(tiny, wrong, capfd):
    assert run_demo(replace(tiny, **wrong)) == 2
    assert capfd.readouterr().err


def test_a_network_asked_for_by_name_is_never_replaced(tiny, monkeypatch, capfd):
    monkeypatch.setattr("zensync.demo.launcher.why_not", lambda: "needs root")
    assert run_demo(replace(tiny, network="slow")) == 2
    assert "needs root" in capfd.readouterr().err


def test_plain_text_of_wiki_markup():
    markup = (
        "'''Bold''' [[target|shown]] and [[plain]]{{cite|{{inner}}}}<ref name=a>no</ref>\n"
        "{| class=x\n| {{y}} cell\n|}[[File:a.png|a [[link]]]]\n== Head ==\n"
        "* [http://x.invalid label]&nbsp;<!-- no -->end"
    )
    text = data.plain_text(markup)
    assert "Bold shown and plain" in text
    assert "Head\nlabel\xa0end" in text
    assert not any(mark in text for mark in ("'''", "[", "{", "<", "no", "cell", "png", "inner"))


def test_substitute_text_says_so(folder):
    corpus = data.prepare(folder, offline=True)
    assert "standard library" in corpus.source
    assert "no tokenizer" in corpus.source
    tokens = corpus.load()
    assert tokens.size == corpus.n_tokens
    assert int(tokens.max()) == corpus.vocabulary - 1


def config_of(corpus: data.Corpus, **changes) -> Config:
    config = Config(
        ranks=2,
        steps=6,
        modes=MODES,
        dim=4,
        negatives=8,
        tokens_per_rank=512,
        tokens_file=corpus.tokens_file,
        vocabulary=corpus.vocabulary,
        folder="",
        interface=None,
    )
    return replace(config, **changes)


def test_batches_depend_on_step_and_rank_alone(folder):
    config = config_of(data.prepare(folder, offline=True))
    first, again, other = Batches(config, 0), Batches(config, 0), Batches(config, 1)
    assert first.make(3).centres.equal(again.make(3).centres)
    assert first.make(3).candidates.equal(again.make(3).candidates)
    assert not first.make(3).centres.equal(first.make(4).centres)
    assert not first.make(3).centres.equal(other.make(3).centres)
    batch = first.make(0)
    assert batch.centres.numel() == 512
    assert batch.candidates.numel() == 512 + 8
    assert float(batch.weights.sum()) == pytest.approx(1, abs=1e-5)
    assert bool(torch.isfinite(batch.log_rates).all())


def test_sparse_and_dense_gradients_are_equal(folder):
    config = config_of(data.prepare(folder, offline=True))
    batch = Batches(config, 0).make(0)
    gradients = []
    for sparse in (False, True):
        model = SkipGram(config, sparse=sparse)
        model(batch).backward()
        gradients.append([table.weight.grad for table in (model.inputs, model.outputs)])
    for dense, sparse in zip(*gradients, strict=True):
        assert sparse.is_sparse
        assert torch.allclose(dense, sparse.to_dense(), atol=1e-7)


def ranks_of(*, sent: int = 1000, step_s: float = 1.0, n_steps: int = 12) -> list[RankResult]:
    """Two ranks that saw the same in all modes."""

    def mode() -> ModeResult:
        return ModeResult(
            loss=[4.0 - 0.1 * step for step in range(n_steps)],
            step_s=[step_s] * n_steps,
            sync_s=[step_s / 2] * n_steps,
            local_s=[0.1] * n_steps,
            sent_bytes=[sent] * n_steps,
            received_bytes=[sent // 2] * n_steps,
            rows=[10] * n_steps,
            first_batch_after=3.0,
            digest="same",
            equal_digests=True,
        )

    return [RankResult(rank, {name: mode() for name in MODES}, 100, 100) for rank in range(2)]


def runs_of(ranks: list[RankResult], interface: str | None = "zs0") -> list[report.Run]:
    corpus = data.Corpus("", 0, 100, "")
    return report.summarise(ranks, config_of(corpus, interface=interface), SETTING)


def test_checks_hold_when_all_is_well():
    assert all(verdict.holds for verdict in report.checks(runs_of(ranks_of())))


@pytest.mark.parametrize("fault", ["bits", "loss", "rise", "nan"])
def test_checks_find_faults(fault):
    ranks = ranks_of()
    ours = ranks[1].modes["zensync"]
    if fault == "bits":
        ours.digest = "other"
    elif fault == "loss":
        for rank in ranks:
            rank.modes["zensync"].loss = [1.02 * loss for loss in rank.modes["dense"].loss]
    elif fault == "rise":
        for rank in ranks:
            for mode in rank.modes.values():
                mode.first_batch_after = 4.1
    else:
        ours.loss[-1] = float("nan")
    assert not all(verdict.holds for verdict in report.checks(runs_of(ranks)))


def test_bytes_are_the_busiest_ranks_without_idle_ones():
    ranks = ranks_of(sent=1000)
    ranks[1].modes["dense"].received_bytes = [5000] * 12
    ranks[1].modes["dense"].sent_bytes[0] = 10**9  # a warm-up step: not counted
    dense = runs_of(ranks)[0]
    assert (dense.wire_bytes, dense.wire_bytes_tables) == (5000, 4900)
    assert dense.wire_bytes_by == COUNTERS


def test_computed_bytes_are_marked():
    dense, sparse, ours = runs_of(ranks_of(), interface=None)
    assert dense.wire_bytes == 2 * 0.5 * (2 * 100 * 4 * 4)
    assert sparse.wire_bytes == 0.5 * 20 * (4 * 4 + 8)
    assert [run.wire_bytes_by for run in (dense, sparse, ours)] == [
        "computed",
        "computed",
        "its own count",
    ]


def test_targets_are_judged_by_counters_only():
    assert report.targets(runs_of(ranks_of(), interface=None), False) == []
    ranks = ranks_of(sent=100_000, step_s=10.0)
    for rank in ranks:
        ours = rank.modes["zensync"]
        ours.step_s = [1.0] * 12
        ours.sent_bytes = ours.received_bytes = [5000] * 12
        rank.modes["sparse"].sent_bytes = rank.modes["sparse"].received_bytes = [8000] * 12
    assert all(verdict.holds for verdict in report.targets(runs_of(ranks), False))
    words = [verdict.word for verdict in report.targets(runs_of(ranks), True)]
    assert words == ["ok", "void", "ok", "void"]  # bytes are bytes on a busy machine, too
    for rank in ranks:
        rank.modes["sparse"].sent_bytes = rank.modes["sparse"].received_bytes = [6000] * 12
        rank.modes["dense"].step_s = [3.0] * 12
    failed = [v.name for v in report.targets(runs_of(ranks), False) if not v.holds]
    assert failed == ["table bytes ≤ 0.75 × sparse's", "steps/s ≥ 4 × dense's"]


@pytest.mark.parametrize(
    ("load", "strict", "status"), [(0.2, True, 0), (0.5, False, 0), (0.5, True, 1)]
)
def test_times_beside_foreign_load_are_void(tiny, monkeypatch, capfd, load, strict, status):
    ranks = ranks_of(sent=100_000, step_s=10.0)
    for rank in ranks:
        rank.modes["zensync"].step_s = [1.0] * 12
        rank.modes["zensync"].sent_bytes = rank.modes["zensync"].received_bytes = [5000] * 12
    runs, setting = runs_of(ranks), replace(SETTING, foreign_load=load)
    measured = (runs, report.checks(runs), setting)
    monkeypatch.setattr("zensync.demo.launcher._run", lambda *_: measured)
    assert run_demo(replace(tiny, strict=strict)) == status
    void = load > 0.3
    shown = [line for line in capfd.readouterr().out.splitlines() if "steps/s more than" in line]
    assert [line.split()[0] for line in shown] == ["void" if void else "ok"]
    for run in json.loads(tiny.json_file.read_text()):
        assert run["void"] is void
        timed = [one["is"] for one in run["verdicts"] if one["name"].startswith("steps/s")]
        assert timed == ["void" if void else "ok"] * 2


def test_no_environment_leaks_into_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ZENSYNC_DATA", str(tmp_path / "a"))
    assert data.data_folder() == tmp_path / "a"
    assert data.data_folder(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("ZENSYNC_DATA")
    assert data.data_folder() == Path(os.getcwd()) / "data"
