"""`zensync bench --failures`: how its rows are judged; its measurement is one of `make claims`."""

from zensync.bench import failures

LOST = {"kind": "PeerLostError", "culprit": 1}


def judged(ends, fault="kill -9"):
    return failures._row(fault, "native", ends, since=100.0, target=10.0)


def test_the_slowest_rank_counts():
    row = judged([LOST | {"at": 100.5}, LOST | {"at": 103.0}])
    assert row["seconds"] == 3.0
    assert row["same"] == 1
    assert row["met"]
    assert not judged([LOST | {"at": 100.5}, LOST | {"at": 111.0}])["met"]


def test_ranks_that_name_different_things_are_not_the_same():
    for other in (LOST | {"culprit": 2}, LOST | {"kind": "DeadlineError"}):
        row = judged([LOST | {"at": 100.5}, other | {"at": 100.5}])
        assert row["same"] == 0
        assert not row["met"]
    wrong = LOST | {"culprit": 2, "at": 100.5}
    assert judged([wrong, wrong])["same"] == 0  # all agree, on the wrong one
    mismatch = {"kind": "MismatchError", "culprit": 0, "at": 100.5}
    assert judged([mismatch, mismatch], fault="another shape on one rank")["same"] == 1
    nobody = mismatch | {"culprit": None}
    assert judged([nobody, nobody], fault="another shape on one rank")["same"] == 0
