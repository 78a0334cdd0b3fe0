"""Patterns, values and counts of `zensync bench`: each against its definition, worked out here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from zensync.bench.facts import Counter, skewness
from zensync.bench.patterns import PATTERNS, Case, PatternError, front_scale, units_of
from zensync.bench.values import largest_value, values_of

UNITS = 40_000
DRAWN = tuple(pattern for pattern in PATTERNS if pattern not in ("onehot", "vocab"))


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "tokens.npy"
    np.save(path, np.random.default_rng(0).zipf(1.2, 300_000).astype(np.int32) % 20_000)
    return str(path)


def case_of(pattern: str, density: float = 0.05, ranks: int = 4, tokens_file: str = "") -> Case:
    units = 20_000 if pattern == "vocab" else UNITS
    return Case(pattern, units, density, ranks, tokens_file=tokens_file)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_units_are_ascending_distinct_and_repeat_exactly(pattern, tokens_file):
    case = case_of(pattern, tokens_file=tokens_file)
    for rank in range(case.ranks):
        units = units_of(case, rank)
        assert units.dtype == np.int64
        assert (np.diff(units) > 0).all()
        assert units[0] >= 0
        assert units[-1] < case.units
        assert np.array_equal(units, units_of(case, rank))


@pytest.mark.parametrize("density", [0.004, 0.05, 0.2])
@pytest.mark.parametrize("pattern", DRAWN)
def test_density_is_as_asked(pattern, density):
    case = case_of(pattern, density)
    sizes = [units_of(case, rank).size / UNITS for rank in range(case.ranks)]
    # Drawn ones vary by √(U·d); clusters come in 256 units.
    assert sizes == pytest.approx([density] * 4, abs=5 * (density / UNITS) ** 0.5 + 256 / UNITS)


@pytest.mark.parametrize("pattern", ["uniform", "front", "zipf", "clustered", "vocab", "onehot"])
def test_ranks_and_seeds_differ(pattern, tokens_file):
    case = case_of(pattern, tokens_file=tokens_file)
    assert not np.array_equal(units_of(case, 0), units_of(case, 1))
    assert not np.array_equal(units_of(case, 0), units_of(replace(case, seed=5), 0))


@pytest.mark.parametrize("pattern", DRAWN)
def test_all_units_can_be_nonzero(pattern):
    case = Case(pattern, 1000, 1.0, 1)
    assert units_of(case, 0).size == pytest.approx(1000, abs=232)  # clusters: 3 of 256


def test_front_is_dense_in_front():
    case = case_of("front", 0.05)
    units = units_of(case, 0)
    chance = np.minimum(1, front_scale(0.05) * np.exp(-6 * (np.arange(4) + 0.5) / 4))
    counts = np.bincount(units * 4 // UNITS, minlength=4)
    assert (np.diff(counts) < 0).all()
    assert counts[0] > 0.7 * units.size
    assert chance[0] > chance[3]


def test_popular_units_of_zipf_are_everybodys():
    sets = [units_of(case_of("zipf", 0.01), rank) for rank in range(4)]
    assert all(set(range(10)) <= set(units.tolist()) for units in sets)


def test_clusters_are_runs():
    units = units_of(case_of("clustered", 0.05), 0)
    starts = np.flatnonzero(np.diff(units, prepend=-2) != 1)
    assert starts.size <= units.size / 256
    assert (np.diff([*starts, units.size]) % 256 == 0).all()


def test_strides():
    assert units_of(Case("strided", 1000, 0.1, 4), 3)[:3].tolist() == [3, 13, 23]


def test_identical_and_disjoint():
    same = [units_of(case_of("identical"), rank) for rank in range(4)]
    assert all(np.array_equal(units, same[0]) for units in same)
    apart = np.concatenate([units_of(case_of("disjoint", 0.25), rank) for rank in range(4)])
    assert np.array_equal(np.sort(apart), np.arange(UNITS))  # four quarters are the whole
    with pytest.raises(PatternError, match=r"disjoint.*at most 0\.25"):
        units_of(case_of("disjoint", 0.26), 0)


def test_onehot_is_one_unit():
    assert [units_of(case_of("onehot"), rank).size for rank in range(4)] == [1] * 4


def test_vocab_takes_the_first_distinct_tokens_of_each_ranks_text(tmp_path):
    np.save(tmp_path / "t.npy", np.array([5, 5, 1, 9, 1, 2, 7, 2, 2, 30], dtype=np.int32))
    case = Case("vocab", 10, 0.3, 3, tokens_file=str(tmp_path / "t.npy"))
    # 30 is no row of ten; ranks start at tokens 0, 3 and 6 of the nine that are left.
    assert units_of(case, 0).tolist() == [1, 5, 9]
    assert units_of(case, 1).tolist() == [1, 2, 9]
    assert units_of(case, 2).tolist() == [2, 5, 7]
    with pytest.raises(PatternError, match="5 distinct tokens"):
        units_of(replace(case, density=0.6), 0)


def test_an_unknown_pattern_names_those_that_exist():
    with pytest.raises(PatternError, match="uniform, front"):
        units_of(case_of("stripes"), 0)


@pytest.mark.parametrize("ranks", [1, 2, 8, 36, 37, 256])
def test_sums_are_exact_in_bfloat16(ranks):
    assert 1 <= largest_value(ranks) <= 7
    assert largest_value(ranks) * ranks <= 256  # which has 8 bits


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="256"):
        largest_value(257)


def test_values_are_small_nonzero_and_of_both_signs():
    case = case_of("uniform", ranks=8)
    units = np.arange(1000, dtype=np.int64)
    values = values_of(units, 3, 2, case)
    assert values.shape == (1000, 3)
    assert set(np.unique(values)) == {*range(-7, 0), *range(1, 8)}
    assert np.array_equal(values[10:20], values_of(units[10:20], 3, 2, case))  # by element alone
    assert not np.array_equal(values, values_of(units, 3, 3, case))
    assert not np.array_equal(values, values_of(units, 3, 2, replace(case, seed=1)))


def facts_of(sets: list[list[int]], units: int, hosts: int):
    counter = Counter(Case("uniform", units, 0.5, len(sets)), hosts)
    for rank, held in enumerate(sets):
        counter.add(rank, np.array(held, dtype=np.int64))
    return counter.facts()


def test_counts_by_hand():
    facts = facts_of([[0, 1], [1, 2, 3], [1], []], 8, 4)
    assert facts.units_by_rank == (2, 3, 1, 0)
    assert facts.density == pytest.approx(6 / 4 / 8)
    assert facts.union_density == pytest.approx(4 / 8)
    # k − 1 + n − 1 over n, for k = 1, 3, 1, 1 contributors, n = 4.
    assert facts.bound_units == pytest.approx((3 + 5 + 3 + 3) / 4)


def test_ranks_of_one_host_count_together():
    # Hosts hold {0, 1, 2, 3} and {1}.
    facts = facts_of([[0, 1], [1, 2, 3], [1], []], 8, 2)
    assert facts.bound_units == pytest.approx((1 + 2 + 1 + 1) / 2)
    assert facts.union_density == pytest.approx(4 / 8)
    assert facts_of([[0, 1], [1]], 8, 1).bound_units == 0  # nothing has to cross the one card


def test_skewness_by_hand():
    case = Case("uniform", 8, 0.5, 4)
    # Ranges of two units; the densest is full, the density of all is 3/8.
    assert skewness(np.array([0, 1, 5]), case) == pytest.approx(1 / (3 / 8))
    assert skewness(np.arange(8), case) == pytest.approx(1)
