"""`zensync bench` as a program: command line, exit status, small runs, interruptions."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="synchronisations are measured with torch")

from ranks import free_port
from zensync import bench
from zensync.bench.config import SCHEMES
from zensync.bench.options import make_parser, parse
from zensync.lab.slow_net import why_not

FIELDS = {
    "scheme", "ranks", "hosts", "bytes", "dtype", "row", "pattern", "density", "union_density",
    "skewness", "time_ms", "time_ms_min", "wire_bytes_max", "wire_bytes_mean", "wire_source",
    "link_ideal_ms", "bound_ms", "efficiency", "vs_dense", "vs_dense_low", "vs_dense_high",
    "vs_sparse", "wrong", "foreign_load",
}  # fmt: skip
CASE = ["--size", "64K", "--row", "4", "--pattern", "uniform,onehot", "--density", "0.02"]
CASE += ["--schemes", "all", "--iters", "2", "--warmup", "1"]
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29811"}
WITHOUT_TORCHRUN = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}


def run(*words: str, launcher=("-m", "zensync", "bench"), **variables: str):
    command = [sys.executable, *launcher, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=WITHOUT_TORCHRUN | variables
    )


@pytest.fixture(scope="module")
def spawned() -> dict:
    done = run("--ranks", "3", *CASE, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # nothing else is on stdout


def test_all_schemes_are_right_and_rows_are_complete(spawned):
    assert spawned.keys() >= {"machine", "commit", "foreign_load", "void", "rows"}
    rows = spawned["rows"]
    assert [row["scheme"] for row in rows] == [*SCHEMES] * 2
    assert all(row.keys() >= FIELDS for row in rows)
    assert sum(row["wrong"] for row in rows) == 0
    assert all(row["time_ms"] >= row["time_ms_min"] > 0 for row in rows)
    assert all(row["vs_dense_low"] <= row["vs_dense"] <= row["vs_dense_high"] for row in rows)
    assert all(row["link_ideal_ms"] is None and row["efficiency"] is None for row in rows)
    by_scheme = {row["scheme"]: row for row in rows[: len(SCHEMES)]}
    assert by_scheme["torch_dense"]["vs_dense"] == 1
    assert by_scheme["torch_dense"]["wire_bytes_max"] == round(65536 * 4 / 3)
    assert by_scheme["balanced"]["wire_source"] == "count"
    assert by_scheme["balanced"]["transport"] == "native"
    assert by_scheme["torch_dense"]["transport"] == "gloo"
    assert 0 < by_scheme["balanced"]["wire_bytes_max"] < by_scheme["dense_ring"]["wire_bytes_max"]
    onehot = rows[-1]
    assert onehot["density"] == pytest.approx(16 / 65536)
    assert onehot["density_asked"] is None


def test_torchrun_gives_the_same_rows_and_bytes(spawned, tmp_path):
    path = tmp_path / "rows.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = run(*CASE, "--json", str(path), launcher=(*launcher, "-m", "zensync", "bench"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recursive_doubling") == 2  # rank 0 alone prints

    def fixed(rows: list[dict]) -> list[dict]:
        varies = ("time", "vs_", "late_", "foreign_")
        return [{k: v for k, v in row.items() if not k.startswith(varies)} for row in rows]

    assert fixed(json.loads(path.read_text())["rows"]) == fixed(spawned["rows"])


def test_a_broken_scheme_is_found():
    done = run("--ranks", "2", "--size", "4K", "--schemes", "_broken,torch_dense", "--iters", "1",
               "--warmup", "0")  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "_broken, front: 2 wrong elements" in done.stderr  # counted pass and timed one
    assert "torch_dense, front" not in done.stderr


def test_a_rank_that_fails_is_heard():
    done = run("--ranks", "2", "--size", "4K", "--schemes", "auto", ZENSYNC_CPU_TARGET="abacus")
    assert done.returncode == 2
    assert "last words" in done.stderr
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_fails_in_a_part_is_heard():
    done = run("--failures", ZENSYNC_CPU_TARGET="abacus")
    assert done.returncode == 2
    assert "its last words" in done.stderr
    assert "abacus" in done.stderr
    assert done.stdout == ""


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def struck(child, number, count, after_s):
    """Signals a launcher a while after its `count` ranks were started; the ranks, what it said."""
    try:
        until = time.monotonic() + 20
        while len(ranks := children_of(child.pid)) < count and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(after_s)
        child.send_signal(number)
        return ranks, child.communicate(timeout=10)[0]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("number", "status", "slow"),
    [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False), (signal.SIGKILL, -9, False)],
)
def test_an_interrupted_run_leaves_nothing(number, status, slow, tmp_path):
    command = [sys.executable, "-m", "zensync", "bench", "--ranks", "2", "--size", "64K"]
    command += ["--iters", "100000", "--schemes", "torch_dense"]
    if slow and why_not() is None:
        command += ["--rate", "100mbit"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=WITHOUT_TORCHRUN | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    ranks, said = struck(child, number, 2, 0.3)
    assert len(ranks) == 2
    assert child.returncode == status, said
    until = time.monotonic() + 5
    while any(map(is_running, ranks)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, ranks))
    if number != signal.SIGKILL:  # nobody tidies up then; the next run does
        assert list(tmp_path.iterdir()) == []
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False)
        assert f"zs{child.pid}-" not in listed.stdout


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_run_of_failures_leaves_nothing(number, status, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-m", "zensync", "bench", "--failures"],
        stdout=subprocess.DEVNULL, env=WITHOUT_TORCHRUN | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    ranks, _ = struck(child, number, 3, 1.0)
    assert child.returncode == status
    assert len(ranks) == 3
    until = time.monotonic() + 15  # a rank that is just starting sees its parent gone
    while any(map(is_running, ranks)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, ranks))
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []


@pytest.mark.skipif(why_not() is not None, reason=f"a slow-link network {why_not()}")
def test_in_the_slow_network_bytes_are_the_cards():
    done = run("--ranks", "4", "--hosts", "2", "--rate", "100mbit", "--size", "1M", "--json", "-",
               "--schemes", "auto,torch_dense", "--iters", "1", "--density", "0.05")  # fmt: skip
    assert done.returncode == 0, done.stderr
    auto, dense = json.loads(done.stdout)["rows"]
    assert (dense["hosts"], dense["wire_source"]) == (2, "interface")
    # A ring of four ranks crosses each card once: all but headers.
    assert dense["wire_bytes_max"] == pytest.approx(1.5 * 2**20, rel=0.03)
    assert dense["link_ideal_ms"] == pytest.approx(dense["wire_bytes_max"] * 8.365e-5, rel=1e-3)
    assert dense["time_ms"] > 0.97 * dense["link_ideal_ms"]  # buckets were empty
    assert auto["wire_bytes_max"] < 0.5 * dense["wire_bytes_max"]
    assert auto["bound_ms"] > 0
    assert auto["efficiency"] is None  # less than four buckets
    assert auto["wrong"] == dense["wrong"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schemes", "auto,fast"], "no scheme is called 'fast'; there are auto"),
        (["--schemes", "auto,auto"], "each once"),
        (["--pattern", "moon"], "no pattern is called 'moon'; there are uniform"),
        (["--density", "0"], "above 0 and at most 1"),
        (["--density", "0.1,1.5"], "above 0 and at most 1"),
        (["--density", "many"], "a fraction such as"),
        (["--size", "10"], "not a multiple of a row"),
        (["--size", "32k"], "'32k' is not a number of bytes"),
        (["--size", "1M", "--row", "3"], "not a multiple of a row"),
        (["--row", "8", "--parts", "3"], "--parts 3 does not divide"),
        (["--parts", "all"], "'all' is not a whole number"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "300"], "at most 256 ranks"),
        (["--hosts", "5"], "--hosts must be 1 to 4"),
        (["--iters", "0"], "--iters must be at least 1"),
        (["--rate", "fast"], "'fast' is not a rate"),
        (["--dtype", "float16", "--schemes", "torch_sparse"], "does not add COO tensors"),
        (["--dtype", "float8"], "invalid choice"),
        (["--pattern", "disjoint", "--density", "0.3"], "at most 0.25"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--json", "/"], "is a folder"),
        (["--seed", str(2**64)], "--seed must be below 2^63"),
        (["--pattern", "vocab", "--offline", "--data", "/dev/null/data"], "/dev/null/data"),
        (["--kernels", "--size", "1M"], "--size has no effect"),
        (["--kernels", "--timeout-s", "9"], "--timeout-s has no effect with --kernels"),
        (["--timeout-s", "nan"], "--timeout-s must be a number of seconds above 0, not nan"),
        (["--timeout-s", "inf"], "--timeout-s must be a number of seconds above 0, not inf"),
        (["--timeout-s", "-1"], "--timeout-s must be a number of seconds above 0, not -1"),
        (["--data", "x"], "--data has no effect without --bytes, --sharded or the pattern"),
        (["--exchange", "--offline"], "--offline has no effect without --bytes"),
        (["--check"], "--check needs one of --kernels"),
    ],
)
def test_what_cannot_be_measured_is_one_line(monkeypatch, capsys, words, said):
    assert status_of(monkeypatch, words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""


def status_of(monkeypatch, words: list[str], **variables: str) -> int:
    for name in ("RANK", "WORLD_SIZE", *MEETING):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["zensync bench", *words])
    try:
        return bench.main()
    except SystemExit as why:
        return int(why.code)


def test_what_zensync_does_not_do_is_not_measured():
    done = run("--ranks", "2", "--size", "4K", ZENSYNC_DISABLE="1")
    assert done.returncode == 2
    assert "ZENSYNC_DISABLE=1 is set" in done.stderr


def test_results_that_cannot_be_written_are_one_line(monkeypatch, capsys):
    def fails(_options):
        raise PermissionError(13, "Permission denied", "x.json")

    monkeypatch.setattr(bench, "_measure", fails)
    assert status_of(monkeypatch, ["--kernels"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "zensync bench: [Errno 13] Permission denied: 'x.json'"
    ]


def test_a_rate_needs_root(monkeypatch, capsys):
    monkeypatch.setattr("zensync.bench.launcher.why_not", lambda: "needs root")
    assert status_of(monkeypatch, ["--rate", "200mbit"]) == 2
    assert "--rate: a slow-link network needs root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--rate", "200mbit"], "not under torchrun"), (["--ranks", "3"], "torchrun has started 2")],
)
def test_torchruns_ranks_are_what_there_is(monkeypatch, capsys, words, said):
    assert status_of(monkeypatch, words, RANK="0", WORLD_SIZE="2", **MEETING) == 2
    assert said in capsys.readouterr().err
    assert status_of(monkeypatch, words, RANK="1", WORLD_SIZE="2", **MEETING) == 2
    assert capsys.readouterr().err == ""  # once is enough


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "5"}, "RANK is 5; of WORLD_SIZE 2 it must be 0 to 1"),
        ({"RANK": "-1"}, "RANK is -1; of"),
        ({"RANK": "x"}, "RANK is 'x', not a whole number"),
        ({"RANK": ""}, "RANK is not set; a launcher sets"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set; a launcher sets"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0; it must be at least 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set; a launcher sets"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; it must be 1 to 65535"),
        ({"ZS_RATE": "200mbit"}, "ZS_RATE is set and ZS_HOSTS is not; tools/slow_net.py sets both"),
        ({"ZS_RATE": "200mbit", "ZS_HOSTS": "2"}, "ZS_RATE is set and ZS_BURST is not"),
        ({"ZS_RATE": "200mbit", "ZS_HOSTS": "9", "ZS_BURST": "128kb"}, "--hosts must be 1 to 2"),
    ],
)
def test_what_a_launcher_leaves_open_is_one_line(monkeypatch, capsys, changed, said):
    given = {"RANK": "0", "WORLD_SIZE": "2", **MEETING, **changed}
    assert status_of(monkeypatch, ["--size", "4K", "--timeout-s", "30"], **given) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_end_at_the_time_out(rank):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run("--size", "4K", "--timeout-s", "3", RANK=str(rank), WORLD_SIZE="2", **place)
    assert done.returncode == 2
    where = f"127.0.0.1:{place['MASTER_PORT']}"
    said = f"zensync bench: rank {rank} of 2 has not met the others at {where} after 3 s; stopped"
    assert done.stderr.splitlines() == [said]


def test_a_port_that_is_taken_is_one_line_of_ours():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = run("--size", "4K", RANK="0", WORLD_SIZE="2", **place)
    assert done.returncode == 2
    assert f"has not met the others at 127.0.0.1:{port}: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_run_of_torchruns_ranks_ends_at_the_time_out():
    words = ("--size", "64K", "--iters", "100000", "--schemes", "torch_dense", "--timeout-s", "12")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(run, *words, RANK=str(rank), WORLD_SIZE="2", **place) for rank in (0, 1)
        ]
        first, second = (end.result() for end in ends)
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.splitlines()[-1] == "zensync bench: not done after 12 s; stopped"
    assert "not done" not in second.stderr
    assert "Traceback" not in second.stderr


def parsed(*words: str):
    parser = make_parser()
    return parse(parser, parser.parse_args(list(words)), None)[0]


def test_lists_and_units():
    config = parsed("--size", "64K,2M", "--density", "0.01,0.5", "--pattern", "front,onehot")
    assert config.sizes == (65536, 2 << 20)
    # What is defined without a density comes once.
    assert [case.pattern for _, case in config.cases()] == ["front", "front", "onehot"] * 2
    assert parsed("--rate", "1.5gbit").rate_bits_per_s == 1.5e9
    assert parsed("--schemes", "all").schemes == SCHEMES
    assert "torch_sparse" not in parsed("--schemes", "all", "--dtype", "float16").schemes
    assert parsed("--row", "8", "--parts", "2").parts == 2
    assert (parsed("--ranks", "6").hosts, parsed("--ranks", "6", "--hosts", "2").hosts) == (6, 2)


@pytest.mark.skipif(why_not() is not None, reason=f"a slow-link network {why_not()}")
def test_inside_somebody_elses_slow_network():
    tool = (str(Path(__file__).resolve().parents[2] / "tools/slow_net.py"), "run", "--hosts", "2")
    bench_words = ("--", sys.executable, "-m", "zensync", "bench", "--json", "-")
    done = run("--size", "1M", "--schemes", "torch_dense", "--iters", "1", "--warmup", "0",
               launcher=(*tool, "--rate", "100mbit", *bench_words))  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout)
    assert whole["network"] == "100mbit"
    row = whole["rows"][0]
    assert (row["hosts"], row["rate_bits_per_s"], row["wire_source"]) == (2, 1e8, "interface")
    assert row["wire_bytes_max"] == pytest.approx(2**20, rel=0.03)
    assert row["time_ms"] > 0.97 * row["link_ideal_ms"]
