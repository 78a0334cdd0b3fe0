"""`_core.loopback_sum` against the obvious dense sum, for cases that Hypothesis draws.

Values are small integers, so every order of adding gives the same bits. The arrays come from a
drawn seed; what a failure prints is enough to repeat it. ZENSYNC_TEST_FACTOR multiplies the number
of cases.
"""

import math
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zensync import _core

CASES = 1000 * int(os.environ.get("ZENSYNC_TEST_FACTOR", "1"))
DRAWN = settings(
    max_examples=CASES,
    deadline=None,  # the machine may be busy
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)

FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int64")
SPARSE = ("auto", "balanced", "recursive_doubling", "agsparse")


@dataclass(frozen=True)
class Case:
    """One call: `rows` × `row_shape` on each of `ranks` ranks, `density` of the rows touched."""

    ranks: int
    rows: int
    row_shape: tuple
    density: float
    dtype: str
    op: str
    seed: int
    options: dict
    coalesced: bool = False


@st.composite
def cases(draw, schemes):
    dtype = draw(st.sampled_from(DTYPES))
    options = {
        "scheme": draw(st.sampled_from(schemes)),
        "codec": draw(st.sampled_from(("blocks", "raw32", "raw64", "bitmap", "elias_fano"))),
        "partition": draw(st.sampled_from(("rotation", "range"))),
        "verify": draw(st.booleans()),
        "steps": draw(st.integers(1, 3)),
        "allow_dense": False,
    }
    rows = draw(st.integers(0, 40) | st.integers(0, 20_000))
    row_shape = draw(st.sampled_from(((), (1,), (2,), (3,), (8,), (12,), (2, 3))))
    chunks = draw(st.sampled_from((1, 5, 40)))  # at most about so many
    options["max_bytes"] = 0 if chunks == 1 else 1 + 48 * rows * math.prod(row_shape) // chunks
    return Case(
        ranks=draw(st.integers(1, 5)),
        rows=rows,
        row_shape=row_shape,
        density=draw(st.sampled_from((0.0, 0.001, 0.02, 0.2, 0.7, 1.0))),
        dtype=dtype,
        op=draw(st.sampled_from(("sum", "avg"))) if dtype in FLOATS else "sum",
        seed=draw(st.integers(0, 2**32 - 1)),
        options=options,
        coalesced=draw(st.booleans()),
    )


def stored(values, dtype):
    """float64 values, each rounded once to `dtype`; bfloat16 as uint16."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def loaded(array, dtype):
    """The reverse, as float64."""
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def values_of(case, random, rows):
    values = random.integers(-4, 5, (rows, *case.row_shape)).astype(np.float64)
    if case.dtype in FLOATS:
        values[random.random(values.shape) < 0.1] = -0.0
    return values


def dense_inputs(case):
    inputs = []
    for rank in range(case.ranks):
        random = np.random.default_rng([case.seed, rank])
        values = values_of(case, random, case.rows)
        values[random.random(case.rows) >= case.density] = 0.0
        inputs.append(stored(values, case.dtype))
    return inputs


def coo_inputs(case):
    """Ids in any order and more than once, or (coalesced) ascending and distinct."""
    inputs = []
    for rank in range(case.ranks):
        random = np.random.default_rng([case.seed, rank])
        count = round(case.rows * case.density)
        ids = random.integers(0, max(case.rows, 1), count)
        if case.coalesced:
            ids = np.unique(ids)
        else:  # few duplicates of one row, so that sums stay exact in 16 bits
            ids = random.permutation(np.concatenate([np.unique(ids), ids[: count // 4]]))
            order = np.argsort(ids, kind="stable")
            place = np.arange(ids.size) - np.searchsorted(ids[order], ids[order])
            ids = ids[np.sort(order[place < 8])]
        inputs.append((ids.astype(np.int64), stored(values_of(case, random, ids.size), case.dtype)))
    return inputs


def finished(total, case):
    return stored(total / case.ranks if case.op == "avg" else total, case.dtype)


def run(case, inputs):
    options = {**case.options, "op": case.op, "rows": case.rows}
    if case.dtype == "bfloat16":
        options["dtype"] = "bfloat16"
    done = _core.loopback_sum(inputs, options)
    assert isinstance(done, dict), done.message
    assert done["errors"] == [None] * case.ranks, [e and e.message for e in done["errors"]]
    assert sum(done["sent_bytes"]) == sum(done["received_bytes"])
    return done["results"]


def require_equal(case, found, expected):
    """Bit for bit: the expected sums have no −0.0."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes(), case


def expected_dense(case, inputs):
    total = np.zeros((case.rows, *case.row_shape))
    for array in inputs:
        total = total + loaded(array, case.dtype)
    return finished(total, case)


def expected_coo(case, inputs):
    rows = np.unique(np.concatenate([ids for ids, _ in inputs]))
    total = np.zeros((case.rows, *case.row_shape))
    for ids, values in inputs:
        np.add.at(total, ids, loaded(values, case.dtype))
    return rows, finished(total[rows], case)


@DRAWN
@given(cases((*SPARSE, "dense_ring")))
def test_dense_stored(case):
    inputs = dense_inputs(case)
    kept = [array.tobytes() for array in inputs]
    expected = expected_dense(case, inputs)
    for result in run(case, inputs):
        require_equal(case, result, expected)
    assert [array.tobytes() for array in inputs] == kept


@DRAWN
@given(cases(SPARSE))
def test_coo(case):
    inputs = coo_inputs(case)
    rows, values = expected_coo(case, inputs)
    for found_rows, found_values in run(case, inputs):
        require_equal(case, found_rows, rows)
        require_equal(case, found_values, values)


CONTROL = Case(3, 50, (2,), 0.5, "float32", "sum", 1, {"scheme": "balanced"})


def test_control_a_wrong_sum_is_found():
    inputs = dense_inputs(CONTROL)
    expected = expected_dense(CONTROL, inputs)
    result = run(CONTROL, inputs)[0]
    require_equal(CONTROL, result, expected)
    for wrong in (1.0, -0.0):
        changed = result.copy()
        changed[np.nonzero(changed == 0)[0][0]] = wrong
        with pytest.raises(AssertionError):
            require_equal(CONTROL, changed, expected)


def test_control_a_missing_row_is_found():
    case = replace(CONTROL, coalesced=True)
    inputs = coo_inputs(case)
    rows, _ = expected_coo(case, inputs)
    with pytest.raises(AssertionError):
        require_equal(case, run(case, inputs)[0][0][:-1], rows)
