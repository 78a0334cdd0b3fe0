"""The failure protocol: ranks that are gone, and ranks that disagree.

Whoever is left names the same culprit within the bounds, and a failed State refuses jobs until it
is made anew. Silent and slow ranks are in test_failures_silent.py (and, with the thresholds at
their defaults, in test_failures_slow.py); how processes end is in test_failures_exit.py.
"""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import zensync
from failing import (
    TRANSPORTS,
    Outcome,
    Ranks,
    Setup,
    add_up,
    bound,
    describe,
    on_both,
    outcome_of,
    require_same,
    table,
    total,
    until_told,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

GONE_S = 10.0
MISMATCH_S = 2.0
AT_ONCE_S = 1.0
EARLIER = "this State stopped after an earlier error, make a new one: "
both_transports = pytest.mark.parametrize("transport", TRANSPORTS)


# ---- gone


class Stuck(Dataset):
    """Item 0 comes, item 1 does not until the test tells "end"."""

    def __init__(self, me):
        self.me = me

    def __len__(self):
        return 2

    def __getitem__(self, place):
        if place:
            self.me.await_told("end")
        return place


def data_worker(me):
    """A DataLoader whose forked worker is alive and busy, with all that it inherited."""
    batches = iter(DataLoader(Stuck(me), num_workers=1, multiprocessing_context="fork"))
    next(batches)
    return batches


def train(me, state):
    """Steps under DDP with the hook, until one fails; raises the object behind DDP's error."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(5000, 16), torch.nn.Linear(16, 4))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, zensync.hook)
    step = 0
    try:
        while True:
            ids = torch.arange(8).reshape(1, 8) + 100 * me.rank + step % 50
            ddp(ids).square().sum().backward()
            step += 1
            if step == 3:
                me.mark("busy")
    except RuntimeError as why:
        if state.last_error is None or state.last_error.message not in str(why):
            raise
        raise state.last_error from why


def body_gone(me, place, victim):
    """What the survivors see, and what their next call does."""
    state = zensync.State(scheme="dense" if "dense" in place else "auto")
    full = "dense" in place
    for turn in range(3):
        add_up(me, state, turn, full=full)
    worker = data_worker(me) if "child" in place and me.rank == victim else None
    if "idle" in place:
        me.mark("busy")
        me.await_told("killed")
        first = outcome_of(lambda: add_up(me, state, 3, full=full))
    elif "ddp" in place:
        first = outcome_of(lambda: train(me, state))
    else:
        first = outcome_of(lambda: until_told(me, state, full=full))
    again = outcome_of(lambda: add_up(me, state, 4, full=full))
    assert isinstance(state.last_error, zensync.Error)
    state.close()
    del worker
    return first, again


PLACES = [
    ("sparse", 1),
    ("sparse", 0),  # which has the TCPStore
    ("dense", 2),
    ("dense", 0),
    ("idle", 1),
    ("idle", 0),
    ("ddp", 1),
    ("child sparse", 1),
    ("child dense", 1),
    ("child idle", 2),
]
QUICK = [("sparse", 1), ("dense", 0), ("child idle", 2)]


@pytest.mark.parametrize(("transport", "place", "victim"), on_both(PLACES, QUICK))
def test_a_killed_rank_is_named(transport, place, victim):
    with Ranks(4, body_gone, place, victim, setup=Setup(transport)) as ranks:
        ranks.await_mark("busy")
        killed_at = ranks.signal(victim, signal.SIGKILL)
        ranks.tell("killed")
        seen = ranks.values(set(range(4)) - {victim}, timeout_s=40)
        # Else its connections were closed by the kernel, as in the other places.
        assert bool(ranks.left()) == ("child" in place)
        ranks.tell("end")
    first = {rank: value[0] for rank, value in seen.items()}
    again = {rank: value[1] for rank, value in seen.items()}
    until = killed_at + bound(GONE_S)
    require_same(first, ["PeerLostError"], culprit=victim, until=until)
    require_same(again, ["PeerLostError"], culprit=victim)
    at_once = [*again.values(), *(first.values() if place == "idle" else [])]
    assert all(outcome.seconds < bound(AT_ONCE_S) for outcome in at_once), at_once


@pytest.mark.parametrize("transport", on_both([()]))
def test_of_two_killed_ranks_all_name_the_same(transport):
    with Ranks(5, body_gone, "sparse", 1, setup=Setup(transport)) as ranks:
        ranks.await_mark("busy")
        killed_at = min(ranks.signal(rank, signal.SIGKILL) for rank in (3, 1))
        seen = ranks.values([0, 2, 4], timeout_s=40)
    first = {rank: value[0] for rank, value in seen.items()}
    require_same(first, ["PeerLostError"], until=killed_at + bound(GONE_S))
    assert first[0].culprit in (1, 3)


def body_go_on(me):
    """The survivors form a new group, and sum in it."""
    state = zensync.State()
    outcome = outcome_of(lambda: until_told(me, state))
    state.close()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{me.folder}/again", rank=[0, None, 1][me.rank], world_size=2
    )
    tensor = table(me.rank)
    zensync.all_reduce(tensor)
    assert torch.equal(tensor, total([0, 2]))
    return outcome


@pytest.mark.parametrize("transport", on_both([()]))
def test_survivors_go_on_in_a_new_group(transport):
    with Ranks(3, body_go_on, setup=Setup(transport)) as ranks:
        ranks.await_mark("busy")
        ranks.signal(1, signal.SIGKILL)
        require_same(ranks.values([0, 2]), ["PeerLostError"], culprit=1)


# ---- mismatched

CASES = (None, "rows", "row", "dtype", "layout", "name", "op", "order", "skip")
SCHEMES = ("auto", "balanced", "recursive_doubling", "agsparse", "dense")
SETTINGS = (
    None,
    ({"scheme": "balanced"}, {"scheme": "agsparse"}),
    ({"scheme": "dense"}, {"scheme": "balanced"}),
    ({"verify": True}, {"verify": False}),
    ({"max_bytes": 1 << 20}, {"max_bytes": 1 << 22}),
)


def call_unlike(state, case, odd):
    """Calls that are alike on all ranks but the odd one (and on that, where `case` is None)."""
    case = case if odd else None
    tensor = torch.zeros({"rows": 601}.get(case, 600), {"row": 5}.get(case, 4))
    tensor[1::50] = 1
    tensor = tensor.double() if case == "dtype" else tensor
    tensor = tensor.to_sparse(1) if case == "layout" else tensor
    op = dist.ReduceOp.AVG if case == "op" else dist.ReduceOp.SUM
    names = {"name": ["c", "b"], "order": ["b", "a"], "skip": ["b"]}.get(case, ["a", "b"])
    for name in names:
        zensync.all_reduce(tensor.clone(), op, name=name, state=state)


def body_unlike(me, scheme):
    """Case → what came of it, what the next call did. Every case has a State of its own."""
    seen = {}
    for place, case in enumerate(CASES):
        with zensync.State(scheme=scheme, deadline_s=20) as state:
            odd = me.rank == place % me.size
            first = outcome_of(lambda: call_unlike(state, case, odd))  # noqa: B023
            again = outcome_of(lambda: call_unlike(state, None, odd))  # noqa: B023
            seen[case] = (first, again)
    return seen


def body_settings(me):
    seen = {}
    for place, pair in enumerate(SETTINGS):
        options = {} if pair is None else pair[me.rank == place % me.size]

        def make_and_use(options=options):
            with zensync.State(deadline_s=20, **options) as state:
                call_unlike(state, None, False)

        outcome = outcome_of(make_and_use)
        seen[str(pair)] = (outcome, outcome)
    return seen


def require_mismatches(values, cases):
    """In every case but the first, all ranks had a MismatchError soon after all had arrived."""
    problems = []
    for case in cases:
        first = {rank: seen[case][0] for rank, seen in values.items()}
        again = {rank: seen[case][1] for rank, seen in values.items()}
        try:
            if case == cases[0]:
                assert all(one.kind is None for one in [*first.values(), *again.values()]), first
                continue
            until = max(outcome.began for outcome in first.values()) + bound(MISMATCH_S)
            require_same(first, ["MismatchError"], until=until)
            require_same(again, ["MismatchError"], culprit=first[0].culprit)
        except AssertionError as why:
            problems.append(f"case {case}: {why}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("transport", "scheme"), on_both(SCHEMES, ["auto", "dense"]))
def test_ranks_that_disagree_in_calls(transport, scheme):
    with Ranks(3, body_unlike, scheme, setup=Setup(transport)) as ranks:
        values = ranks.values(timeout_s=120)
    require_mismatches(values, CASES)
    for first, again in (seen[case] for seen in values.values() for case in CASES[1:]):
        # A rank that is told between two calls has only the second one refused.
        assert again.message == EARLIER + first.message.removeprefix(EARLIER)


@both_transports
def test_ranks_that_disagree_in_settings(transport):
    with Ranks(3, body_settings, setup=Setup(transport)) as ranks:
        require_mismatches(ranks.values(timeout_s=120), [str(pair) for pair in SETTINGS])


# ---- that these checks can fail


def test_controls_of_the_comparison():
    alike = Outcome("PeerLostError", 1, at=5.0)
    require_same({0: alike, 2: alike}, ["PeerLostError"], culprit=1, until=5.0)
    for other in (
        Outcome("PeerLostError", 2, at=5.0),
        Outcome("PeerLostError", None, at=5.0),
        Outcome("DeadlineError", 1, at=5.0),
        Outcome("PeerLostError", 1, at=5.1),
        Outcome(None, 1, at=5.0),
    ):
        with pytest.raises(AssertionError):
            require_same({0: alike, 2: other}, ["PeerLostError", "DeadlineError"], until=5.0)
    with pytest.raises(AssertionError):
        require_same({0: alike, 2: alike}, ["PeerLostError"], culprit=2)
    with pytest.raises(AssertionError):
        require_same({}, ["PeerLostError"])
    error = zensync.MismatchError("m", rank=2, culprit=1, tensor="t")
    assert describe(error, 0.0).kind == "MismatchError"


def body_wrong_sum(me):
    add_up(me, zensync.State(), turn=0 if me.rank else 1)


def body_endless(me):
    until_told(me, zensync.State())


def body_ends(me):
    me.mark("here")
    os._exit(3)


def test_controls_of_the_processes():
    """A wrong sum, a rank that ends early, and one that hangs fail a test."""
    with Ranks(2, body_wrong_sum, setup=Setup()) as ranks:
        assert all(end.code == 1 and "a wrong sum" in end.error for end in ranks.end().values())
    with Ranks(2, body_ends, setup=Setup(group=False)) as ranks:
        ranks.await_mark("here")
        with pytest.raises(AssertionError, match="exit code 3"):
            ranks.values()
        with pytest.raises(AssertionError, match="before it reached there"):
            ranks.await_mark("there")
    with Ranks(1, body_endless, setup=Setup()) as ranks:
        ranks.await_mark("busy")
        with pytest.raises(AssertionError, match=r"(?s)did not end.*until_told"):
            ranks.end(timeout_s=0.1)
        assert ranks.code(0) is None
    assert ranks.code(0) == -9
