"""From measurements to rows of `zensync bench`: bytes, ideals, ratios, against hand-made cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zensync.bench import sync
from zensync.bench.config import Config
from zensync.bench.facts import Facts
from zensync.bench.figures import (
    CaseResult,
    CpuWindow,
    Measured,
    foreign_load,
    gather_bytes,
    ring_bytes,
    rows_of,
    wire_bytes,
)
from zensync.bench.options import Place, burst_kib
from zensync.bench.patterns import Case

SIZE = 4_000_000
FACTS = Facts((10, 30), 0.00002, 0.00003, 1.5, bound_units=100_000)
SLOW = {"rate_bits_per_s": 200e6, "burst_bytes": 128 << 10, "interface": "zs0"}


def config_of(**changes) -> Config:
    config = Config(
        ranks=2,
        hosts=2,
        sizes=(SIZE,),
        dtype="float32",
        row=1,
        parts=None,
        patterns=("uniform",),
        densities=(0.00002,),
        schemes=("auto", "torch_dense", "torch_sparse"),
        iters=3,
        warmup=1,
        seed=0,
    )
    return replace(config, **changes)


def result_of(config: Config, **moved: int) -> CaseResult:
    """auto takes 1, 2, 3 s on its slowest rank; torch_dense 4, 4, 12; torch_sparse 2, 2, 3."""
    seconds = {
        "auto": ([1.0, 2.0, 1.0], [0.5, 1.0, 3.0]),
        "torch_dense": ([4.0, 4.0, 12.0], [4.0, 3.0, 1.0]),
        "torch_sparse": ([2.0, 2.0, 3.0], [1.0, 1.0, 1.0]),
    }
    by_scheme = {}
    for name, ranks in seconds.items():
        sent = moved.get(name, 1_000_000)
        by_scheme[name] = [
            Measured(list(ranks[rank % 2]), 0, sent, sent // 2, 0) for rank in range(config.ranks)
        ]
    case = Case("uniform", SIZE // 4, 0.00002, config.ranks)
    return CaseResult(SIZE, case, FACTS, by_scheme, 0.1)


def rows_by_scheme(config: Config, result: CaseResult) -> dict:
    return {row["scheme"]: row for row in rows_of(result, config)}


def test_times_are_the_slowest_ranks_and_ratios_are_paired():
    row = rows_by_scheme(config_of(), result_of(config_of()))["auto"]
    assert row["times_ms"] == [1000, 2000, 3000]
    assert (row["time_ms"], row["time_ms_min"]) == (2000, 1000)
    assert row["vs_dense"] == 4  # of 4, 2, 4; not 4 s over 2 s
    assert (row["vs_dense_low"], row["vs_dense_high"]) == (2, 4)
    assert row["vs_sparse"] == 1  # of 2, 1, 1


def test_links_ideal_bound_and_efficiency():
    rows = rows_by_scheme(config_of(**SLOW), result_of(config_of()))
    row = rows["auto"]
    assert row["wire_source"] == "interface"
    assert row["wire_bytes_max"] == 1_000_000
    # 8 Mbit of payload in full frames at 200 Mbit/s.
    assert row["link_ideal_ms"] == pytest.approx(8e6 * 1514 / 1448 / 200e6 * 1e3)
    # 100 000 values of four bytes.
    assert row["bound_ms"] == pytest.approx(3.2e6 * 1514 / 1448 / 200e6 * 1e3)
    assert row["efficiency"] == pytest.approx(row["bound_ms"] / 2000)
    assert row["vs_dense"] == 4


def test_loopback_has_no_ideal_but_ratios():
    row = rows_by_scheme(config_of(), result_of(config_of()))["auto"]
    assert row["link_ideal_ms"] is row["bound_ms"] is row["efficiency"] is None
    assert row["vs_dense"] is not None


@pytest.mark.parametrize("scheme", ["auto", "torch_dense"])
def test_what_a_full_bucket_gives_away_gets_no_ratio(scheme):
    config = config_of(**SLOW)
    enough, too_few = 4 * 131072, 4 * 131072 - 1
    assert rows_by_scheme(config, result_of(config, **{scheme: enough}))["auto"]["vs_dense"] == 4
    rows = rows_by_scheme(config, result_of(config, **{scheme: too_few}))
    assert rows["auto"]["vs_dense"] is None
    assert rows["auto"]["vs_dense_low"] is None
    assert (rows["auto"]["efficiency"] is None) is (scheme == "auto")
    assert rows["auto"]["time_ms"] == 2000
    assert (rows["auto"]["vs_sparse"] is None) is (scheme == "auto")


def test_without_a_rival_there_is_no_ratio():
    result = result_of(config_of())
    del result.by_scheme["torch_dense"]
    row = rows_by_scheme(config_of(), result)["auto"]
    assert row["vs_dense"] is None
    assert row["vs_sparse"] == 1


def test_the_latest_start_is_told():
    result = result_of(config_of())
    result.by_scheme["auto"][1].late_s = 0.002
    assert rows_by_scheme(config_of(), result)["auto"]["late_ms"] == 2


def test_wrong_elements_are_summed_over_ranks():
    result = result_of(config_of())
    for found in result.by_scheme["auto"]:
        found.wrong = 3
    rows = rows_by_scheme(config_of(), result)
    assert [row["wrong"] for row in rows.values()] == [6, 0, 0]


def test_torch_is_computed_on_loopback_and_ours_is_counted():
    config = config_of()
    result = result_of(config)
    assert wire_bytes("auto", result, config) == ([1e6, 1e6], "count")
    assert wire_bytes("torch_dense", result, config) == ([SIZE, SIZE], "computed")
    # Entries of twelve bytes, and 72 bytes of sizes: blocks of 192 and 432.
    assert wire_bytes("torch_sparse", result, config) == ([432, 432], "computed")


def test_what_auto_hands_to_the_dense_all_reduce_counts():
    result = result_of(config_of())
    for found in result.by_scheme["auto"]:
        found.dense_bytes = 1000
    assert wire_bytes("auto", result, config_of()) == ([1_001_000, 1_001_000], "computed")


def test_cards_are_counted_once_a_host():
    config = config_of(ranks=4, **SLOW)
    result = result_of(config)
    for rank, found in enumerate(result.by_scheme["auto"]):
        found.sent_bytes, found.received_bytes = (7, 9) if rank == 2 else (5, 1)
    assert wire_bytes("auto", result, config) == ([5, 9], "interface")


def test_rings_by_hand():
    assert ring_bytes(800, 4) == 1200
    # Rank 0 passes on its own block and the last one, and is sent the other two.
    assert gather_bytes([1, 10, 100]) == [110, 101, 110]
    assert gather_bytes([5]) == [0]
    assert gather_bytes([5, 5]) == [5, 5]


def test_foreign_load_is_that_of_the_busiest_machine():
    windows = [
        CpuWindow("a", 10, 9, 4),  # nine seconds busy, eight of them ours
        CpuWindow("a", 10, 9, 4),
        CpuWindow("b", 10, 7, 2),
    ]
    assert foreign_load(windows) == pytest.approx(0.5)
    assert foreign_load([CpuWindow("a", 10, 1, 4)]) == 0


@pytest.mark.parametrize(("rate", "kib"), [(100e6, 128), (200e6, 128), (1e9, 256), (4e9, 1024)])
def test_buckets_carry_their_rate(rate, kib):
    assert burst_kib(rate) == kib


@pytest.mark.parametrize(("load", "void"), [(0.29, False), (0.31, True)])
def test_a_busy_machine_voids_a_run(load, void, capsys, tmp_path):
    config = config_of()
    result = replace(result_of(config), foreign_load=load)
    path = tmp_path / "rows.json"
    sync.report(rows_of(result, config), config, Place(None, None, False, 1.0), str(path))
    said = capsys.readouterr()
    assert ("VOID" in said.err) is void
    assert "torch_sparse" in said.out
    assert f'"void": {str(void).lower()}' in path.read_text()
