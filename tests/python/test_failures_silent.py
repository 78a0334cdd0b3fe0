"""The failure protocol: ranks that are silent, and ranks that are slow, with short thresholds.

A rank whose process goes on is slow and not dead, whatever Python does; one that says nothing for
`silent_after_s` is given up, and hears of it when it comes back.
"""

import ctypes
import signal
import time

import pytest
import zensync
from failing import TRANSPORTS, Ranks, Setup, add_up, bound, outcome_of, require_same, until_told

SILENT_S = 3.0
GONE_S = 10.0
AT_ONCE_S = 1.0
SILENCE = ("PeerLostError", "DeadlineError")  # of a rank that says nothing any more
both_transports = pytest.mark.parametrize("transport", TRANSPORTS)


def body_sums(me, options):
    """What ended the sums, and their number if it was no error. Stays until told to end."""
    state = zensync.State(**options)
    full = options.get("scheme") == "dense"
    turns = []
    outcome = outcome_of(lambda: turns.append(until_told(me, state, full=full)))
    me.mark("over")
    me.await_told("end")
    state.close()
    return outcome, turns


@both_transports
def test_a_short_stop_goes_unnoticed(transport):
    with Ranks(3, body_sums, {"silent_after_s": 8}, setup=Setup(transport)) as ranks:
        ranks.await_mark("busy")
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(3)  # the test's subject
        ranks.signal(1, signal.SIGCONT)
        ranks.tell("finish")
        ranks.tell("end")
        ends = ranks.end()
    for end in ends.values():
        assert end.code == 0, end
        assert end.value[0].kind is None, end
        assert end.warnings == [], end
    assert len({end.value[1][0] for end in ends.values()}) == 1


@both_transports
def test_silence_for_good_is_an_error_and_who_comes_back_hears_of_it(transport):
    setup = Setup(transport)
    options = [{"silent_after_s": SILENT_S, "scheme": scheme} for scheme in ("balanced", "dense")]
    with (
        Ranks(3, body_sums, options[0], setup=setup) as sparse,
        Ranks(3, body_sums, options[1], setup=setup) as dense,
    ):
        for ranks in (sparse, dense):
            ranks.await_mark("busy")
        stopped_at = [ranks.signal(1, signal.SIGSTOP) for ranks in (sparse, dense)]
        for ranks, at in zip((sparse, dense), stopped_at, strict=True):
            ranks.await_mark("over", [0, 2])
            back_at = ranks.signal(1, signal.SIGCONT)
            ranks.await_mark("over", [1])
            ranks.tell("end")
            seen = {rank: value[0] for rank, value in ranks.values().items()}
            survivors = {rank: seen[rank] for rank in (0, 2)}
            require_same(survivors, SILENCE, culprit=1, until=at + SILENT_S + bound(GONE_S))
            assert all(one.at > at + SILENT_S - 0.5 for one in survivors.values()), survivors
            require_same(seen, [seen[0].kind], culprit=1, until=back_at + bound(GONE_S))


def body_stall(me, scheme):
    """Rank 1 computes for longer than silent_after_s and lets no other Python thread run."""
    state = zensync.State(scheme=scheme, silent_after_s=3)
    full = scheme == "dense"
    add_up(me, state, 0, full=full)
    if me.rank == 1:
        ctypes.PyDLL(None).sleep(6)  # holds the GIL
    return outcome_of(lambda: [add_up(me, state, turn, full=full) for turn in (1, 2)])


@both_transports
def test_a_busy_rank_is_slow_not_dead(transport):
    setup = Setup(transport)
    with (
        Ranks(3, body_stall, "auto", setup=setup) as sparse,
        Ranks(3, body_stall, "dense", setup=setup) as dense,
    ):
        for rank, end in [*sparse.end().items(), *dense.end().items()]:
            assert end.code == 0, end
            assert end.value.kind is None, end
            assert rank == 1 or end.value.seconds > 5, end  # they did wait
            assert end.warnings == [], end


def body_deadline(me):
    state = zensync.State(deadline_s=2, silent_after_s=30)
    add_up(me, state, 0)
    if me.rank == 1:
        me.await_told("late")
    outcome = outcome_of(lambda: add_up(me, state, 1))
    me.mark("over")
    me.await_told("end")
    return outcome


@both_transports
def test_who_does_not_come_is_named_at_the_deadline(transport):
    with Ranks(3, body_deadline, setup=Setup(transport)) as ranks:
        ranks.await_mark("over", [0, 2])
        ranks.tell("late")
        ranks.await_mark("over", [1])
        ranks.tell("end")
        outcomes = ranks.values()
    require_same(outcomes, ["DeadlineError"], culprit=1)
    for rank in (0, 2):
        assert 1.9 < outcomes[rank].seconds < 2 + bound(5.0), outcomes
        assert "weights" in f"{outcomes[rank].tensor} {outcomes[rank].message}"
    assert outcomes[1].seconds < bound(AT_ONCE_S)
