"""How processes end: exceptions, Ctrl-C, jobs in flight, forks.

Every process of the job ends within the bound, none aborts, none is left.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import zensync
from failing import (
    Ranks,
    Setup,
    add_up,
    bound,
    on_both,
    outcome_of,
    poll,
    require_same,
    table,
    until_told,
)
from torch.nn.parallel import DistributedDataParallel

END_S = 5.0
CTRL_C = (-signal.SIGINT, 130, 1)  # as Python ends by it; 1 where it met an error on its way


def require_ends(ends, codes, since):
    """Ranks ended soon after `since`, each with one of its exit codes: no abort, no crash."""
    for rank, end in ends.items():
        assert end.code in codes[rank], f"rank {rank}: {end.code}, not {codes[rank]}\n{end.log}"
        late = end.at - since - bound(END_S)
        assert late <= 0, f"rank {rank} ended {late:.1f} s too late\n{end.log}"


# ---- exceptions


class Fails(torch.autograd.Function):
    """The identity, until its gradient is asked for."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("made to fail in backward")


def train_with_hook(me, state, fails_at=None):
    """Steps under DDP. Rank 1 fails in the middle of backward, when half the buckets have gone."""
    torch.manual_seed(1)
    first, last = torch.nn.EmbeddingBag(5000, 16), torch.nn.Linear(16, 4)
    model = torch.nn.ModuleList([first, last])
    model.forward = lambda ids, fail: last(Fails.apply(first(ids)) if fail else first(ids))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    ddp.register_comm_hook(state, zensync.hook)
    for step in range(10_000):
        if step == 3:
            me.mark("busy")
        fail = me.rank == 1 and step == fails_at
        if fail:
            me.mark("raised")
        ids = torch.arange(8).reshape(1, 8) + 100 * me.rank + step % 50
        ddp(ids, fail).square().sum().backward()


def body_raises(me, where):
    """The exception of rank 1, and what the others get, go through to the end of the program."""
    state = zensync.State()
    try:
        if where == "backward":
            train_with_hook(me, state, fails_at=4)
        for turn in range(10_000):
            if me.rank == 1 and turn == 5:
                if where == "in flight":
                    zensync.all_reduce(table(1, turn), name="weights", state=state, async_op=True)
                me.mark("raised")
                raise ValueError("made to fail between calls")
            add_up(me, state, turn)
    except RuntimeError:
        me.note = state.last_error and (type(state.last_error).__name__, state.last_error.culprit)
        raise


@pytest.mark.parametrize(
    ("transport", "where"), on_both(["backward", "between", "in flight"], ["backward"])
)
def test_an_exception_on_one_rank_ends_all(transport, where):
    with Ranks(3, body_raises, where, setup=Setup(transport, destroy=False)) as ranks:
        (raised_at,) = ranks.await_mark("raised", [1])
        ends = ranks.end()
        assert ranks.left() == []
    require_ends(ends, dict.fromkeys(range(3), (1,)), raised_at)
    assert "made to fail" in ends[1].error
    for rank in (0, 2):
        assert ends[rank].note == ("PeerLostError", 1), ends[rank]


# ---- Ctrl-C


def body_interrupted(me, where):
    state = zensync.State(scheme="dense" if where == "dense" else "auto")
    if where == "ddp":
        train_with_hook(me, state)
    if where == "alone":  # nobody else comes
        add_up(me, state, 0)
        me.mark("busy")
        if me.rank != 1:
            me.await_told("never")
    until_told(me, state, full=where == "dense")


@pytest.mark.parametrize(
    ("transport", "where"), on_both(["sparse", "dense", "ddp", "alone"], ["sparse", "dense"])
)
def test_ctrl_c_on_all_ranks(transport, where):
    with Ranks(3, body_interrupted, where, setup=Setup(transport, destroy=False)) as ranks:
        ranks.await_mark("busy")
        at = max(ranks.signal(rank, signal.SIGINT) for rank in range(3))
        ends = ranks.end()
        assert ranks.left() == []
    require_ends(ends, dict.fromkeys(range(3), CTRL_C), at)
    assert any("KeyboardInterrupt" in end.error for end in ends.values())


@pytest.mark.parametrize(("transport", "where"), on_both(["sparse", "dense", "ddp"], ["sparse"]))
def test_ctrl_c_on_one_rank(transport, where):
    with Ranks(3, body_interrupted, where, setup=Setup(transport, destroy=False)) as ranks:
        ranks.await_mark("busy")
        at = ranks.signal(1, signal.SIGINT)
        ends = ranks.end()
        assert ranks.left() == []
    require_ends(ends, {0: (1,), 1: CTRL_C, 2: (1,)}, at)
    for rank in (0, 2):
        assert "rank 1" in ends[rank].error, ends[rank]


# ---- jobs in flight


def body_in_flight(me, full, together):
    """Ends while calls are under way: on all ranks, or on rank 0 that nobody meets."""
    state = zensync.State(scheme="dense" if full else "auto")
    add_up(me, state, 0, full=full)
    if me.rank == 0 or together:
        for turn in range(1, 6):
            tensor = table(me.rank, turn, full)
            zensync.all_reduce(tensor, name="weights", state=state, async_op=True)
        me.mark("ends")
        return None
    me.await_told("rank 0 has ended")
    return outcome_of(lambda: add_up(me, state, 1, full=full))


@pytest.mark.parametrize(
    ("transport", "full", "together"),
    on_both([(False, False), (True, False), (False, True), (True, True)], [(True, False)]),
)
def test_exit_with_jobs_in_flight(transport, full, together):
    setup = Setup(transport, destroy=False)
    with Ranks(3, body_in_flight, full, together, setup=setup) as ranks:
        leaving = range(3) if together else [0]
        at = max(ranks.await_mark("ends", leaving))
        require_ends(ranks.end(leaving), dict.fromkeys(leaving, (0,)), at)
        ranks.tell("rank 0 has ended")
        others = ranks.values([] if together else [1, 2])
        assert ranks.left() == []
    if not together:
        require_same(others, ["PeerLostError"], culprit=0)


@pytest.mark.parametrize("transport", on_both([()]))
def test_exit_while_a_peer_is_stopped(transport):
    """Nobody reads what the leaving rank sends."""
    with Ranks(2, body_in_flight, True, False, setup=Setup(transport, destroy=False)) as ranks:
        ranks.await_mark("ends", [0])  # soon enough: its process has 5 s to end
        ranks.signal(1, signal.SIGSTOP)
        at = time.monotonic()
        require_ends(ranks.end([0]), {0: (0,)}, at)


# ---- forks


def body_forks(me, how):
    """A child forked beside a live State ends as a program ends, and the State goes on."""
    state = zensync.State()
    add_up(me, state, 0)
    add_up(me, state, 1)
    child = os.fork() if me.rank == 1 else 1
    if child == 0:
        if how == "outlives":
            me.await_told("parents have ended")
        elif how == "uses":
            assert outcome_of(lambda: add_up(me, state, 2)).kind == "Error"
        me.mark("child ends")
        sys.exit(7)
    if me.rank == 1 and how != "outlives":
        began = time.monotonic()
        ended = []
        poll(lambda: ended.extend(p for p in os.waitpid(child, os.WNOHANG) if p) or ended, 30, how)
        assert time.monotonic() - began < bound(END_S)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
    for turn in range(2, 5):
        add_up(me, state, turn)
    me.mark("ends")


@pytest.mark.parametrize(("transport", "how"), on_both(["ends", "uses", "outlives"], ["uses"]))
def test_forks_beside_a_state(transport, how):
    with Ranks(2, body_forks, how, setup=Setup(transport)) as ranks:
        ends = ranks.end()
        at = max(ranks.await_mark("ends"))
        require_ends(ends, {0: (0,), 1: (0,)}, at)
        assert bool(ranks.left()) == (how == "outlives")
        ranks.tell("parents have ended")
        poll(lambda: not ranks.left(), bound(END_S), "the forked child did not end")
        ranks.await_mark("child ends", [1])


# ---- that these checks can fail


def body_aborts(me):
    me.mark("ends")
    os.abort()


def body_leaves_a_process(me):
    subprocess.Popen(["sleep", "60"])


def body_lingers(me):
    me.mark("ends")
    time.sleep(1)


def test_controls_of_the_ends():
    setup = Setup(group=False)
    with Ranks(1, body_aborts, setup=setup) as ranks:
        ends = ranks.end()
        with pytest.raises(AssertionError, match="rank 0: -6"):
            require_ends(ends, {0: (0, 1)}, time.monotonic())
    with Ranks(1, body_leaves_a_process, setup=setup) as ranks:
        assert ranks.values() == {0: None}
        (left,) = ranks.left()
    poll(lambda: left not in ranks.left(), 5, "it was not ended")
    with Ranks(1, body_lingers, setup=setup) as ranks:
        ends = ranks.end()
        with pytest.raises(AssertionError, match="too late"):
            require_ends(ends, {0: (0,)}, ends[0].at - bound(END_S) - 0.5)
