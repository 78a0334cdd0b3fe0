"""Every fault at every exchange of every scheme: all ranks end alike, in time, never with a wrong
sum.

One rank of the group has a driver that spoils one of its exchanges. Whatever comes of it, either
all ranks have right sums throughout, or all that live have an error of one class with one culprit.
"""

import contextlib
from dataclasses import replace

import pytest
import torch.distributed as dist
import zensync
from failing import (
    TRANSPORTS,
    Outcome,
    Ranks,
    Setup,
    add_up,
    bound,
    on_both,
    outcome_of,
    require_same,
)

JOBS = 6  # more than exchanges are spoiled: what the last ones missed shows in the next
EXCHANGES = range(3)
DEADLINE_S = 1.5  # for what only a deadline can end
SCHEMES = ("balanced", "recursive_doubling", "agsparse", "dense")
GONE_S, SOON_S = 10.0, 5.0

# Kind → its parameters beside exchange and peer, and the errors that may come of it. None: none
# need come. In all others one must come at some exchange, and the spoiling rank is the culprit.
CORRUPT = ("CorruptMessageError",)
UNEXPECTED = ("CorruptMessageError", "MismatchError")
# Over torch a message that nobody awaits is one that is never taken, which only a deadline ends.
NOT_TAKEN = (*UNEXPECTED, "DeadlineError", None)
LOST_S = 6.0  # as DEADLINE_S, but States are still made within it by ranks that are out of step
KINDS = {
    "delay": (",ms=200", None),
    "truncate": (",bytes=20", CORRUPT),
    "corrupt": (",offset=40,mask=1", CORRUPT),
    "duplicate": ("", NOT_TAKEN),
    "reorder": ("", NOT_TAKEN),
    "drop": ("", (*UNEXPECTED, "DeadlineError")),
}
DEADLINES_S = {"drop": DEADLINE_S, "duplicate": LOST_S, "reorder": LOST_S}
PAIRS = [(1, 0), (0, 2)]  # who spoils, whose message
both_transports = pytest.mark.parametrize("transport", TRANSPORTS)


def fault(kind, exchange, peer):
    to = "" if kind == "delay" else f",peer={peer}"
    return f"{kind}:exchange={exchange}{to}{KINDS[kind][0]}"


def sums(me, scheme, faults, deadline_s=20.0):
    """The first error of some sums on a State of their own; right sums are checked on the way."""
    state = zensync.State(scheme=scheme, deadline_s=deadline_s, _tuning={"faults": faults})
    dist.barrier()  # who dies at once must not do so while others still make their States
    full = scheme == "dense"
    outcome = outcome_of(lambda: [add_up(me, state, turn, full=full) for turn in range(JOBS)])
    with contextlib.suppress(RuntimeError):  # a rank is dead
        # One may have found a fault when the last sum of the others was right.
        dist.barrier()
    if outcome.kind is None:
        outcome = outcome_of(lambda: add_up(me, state, JOBS, full=full))
    state.close()
    return outcome


def body_spoil(me, scheme, cases):
    """Case → outcome, each on a new State: that it can be made is part of the test."""
    seen = {None: sums(me, scheme, None)}
    for case in cases:
        kind, exchange, rank, peer = case
        faults = fault(kind, exchange, peer) if me.rank == rank else None
        seen[case] = sums(me, scheme, faults, DEADLINES_S.get(kind, 20.0))
    seen["after"] = sums(me, scheme, None)
    return seen


def judge(case, outcomes):
    """Whether there was an error; AssertionError unless all ranks ended alike, as allowed."""
    kind, _, spoiler, _ = case
    allowed = KINDS[kind][1]
    if all(outcome.kind is None for outcome in outcomes.values()):
        return False
    assert allowed is not None, f"an error, where all should go well: {outcomes}"
    culprit = spoiler if allowed == CORRUPT else None
    require_same(outcomes, [one for one in allowed if one], culprit=culprit)
    limit_s = bound(SOON_S) + DEADLINES_S.get(kind, 0.0) * JOBS
    assert all(outcome.seconds < limit_s for outcome in outcomes.values()), outcomes
    return True


def judge_all(values, cases):
    problems = []
    errors = {(case[0], *case[2:]): 0 for case in cases}
    for case in cases:
        try:
            outcomes = {rank: seen[case] for rank, seen in values.items()}
            errors[case[0], *case[2:]] += judge(case, outcomes)
        except AssertionError as why:
            problems.append(f"{case}: {why}")
    for control in (None, "after"):
        if any(seen[control].kind is not None for seen in values.values()):
            problems.append(f"without a fault ({control}): {values}")
    for (kind, *pair), count in errors.items():
        must = KINDS[kind][1] is not None and None not in KINDS[kind][1]
        if must and count == 0:
            problems.append(f"{kind} from and to {pair}: no exchange was spoiled")
    assert not problems, "\n".join(problems)


def all_cases(kinds, pairs, exchanges=EXCHANGES):
    return [(kind, exchange, *pair) for kind in kinds for pair in pairs for exchange in exchanges]


@pytest.mark.parametrize(("transport", "scheme"), on_both(SCHEMES, ["balanced"]))
def test_messages_are_spoiled(transport, scheme):
    pairs = PAIRS if (transport, scheme) == ("native", "balanced") else PAIRS[:1]  # more: slow
    cases = all_cases([kind for kind in KINDS if kind != "drop"], pairs)
    with Ranks(3, body_spoil, scheme, cases, setup=Setup(transport)) as ranks:
        judge_all(ranks.values(timeout_s=200), cases)


@pytest.mark.parametrize(("transport", "scheme"), on_both(SCHEMES, ["balanced", "dense"]))
def test_messages_are_lost(transport, scheme):
    cases = all_cases(["drop"], [(1, 0)], range(2))
    with Ranks(3, body_spoil, scheme, cases, setup=Setup(transport)) as ranks:
        judge_all(ranks.values(timeout_s=100), cases)


@pytest.mark.slow
@both_transports
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_messages_are_spoiled_and_lost_among_others(transport, scheme, size):
    pairs = {(1, 0), (0, size - 1), (size - 1, 0), (size - 1, size // 2)}
    pairs = sorted((rank, peer) for rank, peer in pairs if rank != peer)
    if scheme == "recursive_doubling":  # not all talk to each other
        pairs = [(1, 0)]
    cases = all_cases(KINDS, pairs, range(5))
    with Ranks(size, body_spoil, scheme, cases, setup=Setup(transport)) as ranks:
        judge_all(ranks.values(timeout_s=400), cases)


# ---- a rank that dies at an exchange


def body_die(me, scheme, victim, faults):
    return sums(me, scheme, faults if me.rank == victim else None)


def require_all_know(ranks, victim, must_die):
    """The victim killed itself, and all others named it; or nothing happened, where it need not."""
    ends = ranks.end(timeout_s=120)
    survivors = {rank: end.value for rank, end in ends.items() if rank != victim}
    assert all(ends[rank].code == 0 for rank in survivors), ends
    if ends[victim].code == 0 and not must_die:
        assert all(outcome.kind is None for outcome in survivors.values()), survivors
        return
    assert ends[victim].code == -9, ends[victim]
    until = ends[victim].at + bound(GONE_S)
    require_same(survivors, ["PeerLostError"], culprit=victim, until=until)


def die_everywhere(transport, scheme, victims, exchanges):
    """All at once, in processes of their own."""
    with contextlib.ExitStack() as stack:
        running = []
        for victim in victims:
            for exchange in exchanges:
                for after in (0, 1):
                    words = f"die:exchange={exchange},after={after},how=signal"
                    setup = Setup(transport)
                    ranks = Ranks(3, body_die, scheme, victim, words, setup=setup)
                    running.append((stack.enter_context(ranks), victim, exchange == 0))
        for ranks, victim, must_die in running:
            require_all_know(ranks, victim, must_die)


@pytest.mark.parametrize(("transport", "scheme"), on_both(SCHEMES, ["balanced", "dense"]))
def test_a_rank_dies_at_an_exchange(transport, scheme):
    die_everywhere(transport, scheme, [1], range(2))


@pytest.mark.slow
@both_transports
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("exchange", [0, 1, 2, 3])
def test_every_rank_dies_at_an_exchange(transport, scheme, exchange):
    die_everywhere(transport, scheme, range(3), [exchange])


# ---- that these checks can fail


def test_controls_of_the_judge():
    good = Outcome("CorruptMessageError", 1)
    case = ("corrupt", 0, 1, 0)
    assert judge(case, {0: good, 1: good, 2: good})
    assert not judge(case, dict.fromkeys(range(3), Outcome()))
    for bad in (
        replace(good, kind=None),  # it did not notice
        replace(good, kind="PeerLostError"),
        replace(good, culprit=0),
        replace(good, at=1000.0),
    ):
        with pytest.raises(AssertionError):
            judge(case, {0: good, 1: good, 2: bad})
    with pytest.raises(AssertionError, match="all should go well"):
        judge(("delay", 0, 1, 0), {0: good, 1: good, 2: good})
    quiet = dict.fromkeys([None, "after", case], Outcome())
    with pytest.raises(AssertionError, match="no exchange was spoiled"):
        judge_all({0: quiet, 1: quiet}, [case])
    judge_all({0: {**quiet, case: good}, 1: {**quiet, case: good}}, [case])
