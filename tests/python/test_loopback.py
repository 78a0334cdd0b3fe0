"""`_core.loopback_sum`: the engine without torch, for arrays of NumPy; ranks are threads."""

import numpy as np
import pytest
from zensync import _core

SCHEMES = ("balanced", "recursive_doubling", "agsparse", "dense_ring")
DTYPES = (np.float32, np.float64, np.float16, np.int32, np.int64)


def arrays(size, dtype, shape=(300, 4)):
    random = np.random.default_rng(size)
    return [
        (random.integers(-4, 5, shape) * (random.random(shape) < 0.1)).astype(dtype)
        for _ in range(size)
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", range(1, 10))
def test_dense(scheme, size):
    for dtype in DTYPES:
        inputs = arrays(size, dtype)
        kept = [array.copy() for array in inputs]
        done = _core.loopback_sum(inputs, {"scheme": scheme})
        assert done["errors"] == [None] * size
        assert all(np.array_equal(a, b) for a, b in zip(inputs, kept, strict=True))
        for result in done["results"]:
            assert result.dtype == dtype
            assert np.array_equal(result, sum(inputs))
        assert sum(done["sent_bytes"]) == sum(done["received_bytes"])
        for rank, report in enumerate(done["reports"]):
            assert report["sent_bytes"] == done["sent_bytes"][rank]


@pytest.mark.parametrize("codec", ["raw32", "raw64", "blocks", "bitmap", "elias_fano"])
@pytest.mark.parametrize("partition", ["rotation", "range"])
def test_coo_and_options(codec, partition):
    random = np.random.default_rng(3)
    inputs = [(random.integers(0, 90, 50), np.ones((50, 3), np.float32)) for _ in range(3)]
    expected = np.zeros((90, 3), np.float32)
    for indices, values in inputs:
        np.add.at(expected, indices, values)
    options = {"rows": 90, "codec": codec, "partition": partition, "steps": 2, "verify": False}
    done = _core.loopback_sum(inputs, options)
    assert done["errors"] == [None] * 3
    assert len(done["reports_by_step"]) == 2
    for indices, values in done["results"]:
        result = np.zeros_like(expected)
        result[indices] = values
        assert np.array_equal(result, expected)
        assert (np.diff(indices) > 0).all()


def test_average_of_bfloat16():
    one, two = np.array([0x3F80], np.uint16), np.array([0x4040], np.uint16)  # 1 and 3
    done = _core.loopback_sum([one, two], {"dtype": "bfloat16", "op": "avg"})
    assert [result.tolist() for result in done["results"]] == [[0x4000], [0x4000]]


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ([np.ones(3, bool)], {}, "float32"),
        ([np.ones(3)], {"no_such": 1}, "no_such"),
        ([np.ones(3)], {"scheme": "no_such"}, "no_such"),
        ([np.ones(3)], {"codec": "no_such"}, "codec"),
        ([np.ones(3)], {"deadline_s": 0}, "deadline_s"),
        ([np.ones(3)], {"max_bytes": "many"}, "max_bytes"),
        ([], {}, "at least one rank"),
    ],
)
def test_wrong_arguments(inputs, options, text):
    error = _core.loopback_sum(inputs, options)
    assert isinstance(error, _core.ErrorInfo)
    assert text in error.message
    assert error.kind in ("invalid", "unsupported")


def test_mismatch_is_an_error_on_all():
    done = _core.loopback_sum([np.ones(3), np.ones(4)], {})
    assert [error.kind for error in done["errors"]] == ["mismatch", "mismatch"]
    assert done["results"] == [None, None]
