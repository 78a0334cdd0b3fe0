"""Ranks that disagree or die while tensors on a device are summed, with a fake back end."""

import signal

import fake_device
import pytest
import torch
import zensync
from failing import Ranks, Setup, bound, outcome_of, require_same, until_told
from zensync import _device

MISMATCH_S, GONE_S = 2.0, 10.0
VICTIM = 1


def call(kind, rank, state):
    """A sum in which one rank disagrees."""
    odd = rank == VICTIM
    tensor = torch.ones(900 if odd and kind == "shape" else 800, 40)
    if kind == "dtype" and odd:
        tensor = tensor.double()
    if kind == "layout" and odd:
        tensor = tensor.to_sparse(1)
    name = "other" if odd and kind == "name" else "table"
    op = torch.distributed.ReduceOp.AVG if odd and kind == "op" else torch.distributed.ReduceOp.SUM
    zensync.all_reduce(tensor, op, state=state, name=name)


def body_mismatch(me, kind):
    runtime = fake_device.install()
    if kind == "device" and me.rank == VICTIM:
        _device.install(_device.Runtime())
    # With "dense" the CPU way has the same header but for the name.
    state = zensync.State(scheme="dense" if kind == "device" else "auto")
    outcome = outcome_of(lambda: call(kind, me.rank, state))
    entered = [line for line in runtime.log if line[2] == "collective"]
    state.close()
    return outcome, entered


@pytest.mark.parametrize("kind", ["shape", "dtype", "layout", "name", "op", "device"])
def test_a_mismatch_is_named_before_the_device_is_entered(kind):
    with Ranks(3, body_mismatch, kind, setup=Setup()) as ranks:
        seen = ranks.values()
    outcomes = {rank: outcome for rank, (outcome, _) in seen.items()}
    began = max(outcome.began for outcome in outcomes.values())
    require_same(outcomes, ["MismatchError"], until=began + bound(MISMATCH_S))
    assert not any(entered for _, entered in seen.values())


def body_killed(me, full):
    fake_device.install()
    state = zensync.State(scheme="dense" if full else "balanced")
    first = outcome_of(lambda: until_told(me, state, full=True))
    again = outcome_of(lambda: zensync.all_reduce(torch.ones(3), state=state))
    state.close()
    return first, again


@pytest.mark.parametrize("full", [False, True])
def test_a_killed_rank_is_named(full):
    with Ranks(3, body_killed, full, setup=Setup()) as ranks:
        ranks.await_mark("busy")
        killed_at = ranks.signal(VICTIM, signal.SIGKILL)
        seen = ranks.values({0, 2}, timeout_s=40)
    first = {rank: outcome for rank, (outcome, _) in seen.items()}
    require_same(first, ["PeerLostError"], culprit=VICTIM, until=killed_at + bound(GONE_S))
    assert all(again.kind for _, again in seen.values()), "the State takes no more calls"


def body_closed(me):
    """One rank closes its State while the others are inside an exchange that it never enters."""
    fake_device.install()
    state = zensync.State()
    zensync.all_reduce(torch.ones(20000), state=state)
    if me.rank == VICTIM:
        me.await_told("busy")
        state.close()
        return None
    me.mark("waiting")
    outcome = outcome_of(lambda: zensync.all_reduce(torch.ones(20000), state=state))
    state.close()
    return outcome


def test_a_rank_that_closes_its_state_is_named():
    with Ranks(3, body_closed, setup=Setup()) as ranks:
        ranks.await_mark("waiting", [0, 2])
        ranks.tell("busy")
        seen = ranks.values(timeout_s=40)
    require_same({rank: seen[rank] for rank in (0, 2)}, ["PeerLostError"], culprit=VICTIM)


def body_without_agreement(me):
    """The control: a rank that enters the device's collective alone waits there."""
    fake_device.install()
    state = zensync.State(deadline_s=3)
    zensync.all_reduce(torch.ones(20000), state=state)
    if me.rank == VICTIM:
        me.await_told("ended")
        state.close()
        return None
    group = state.groups.of(torch.device("cpu"))
    started = state.call(lambda: lambda: group.all_reduce(torch.ones(5)), "sum")
    assert not started.wait(1.0), "it would have to be told"
    outcome = outcome_of(lambda: raise_of(started))
    me.mark("seen")
    state.close()
    return outcome


def raise_of(pending):
    pending.wait()
    if pending.error is not None:
        raise pending.error


def test_a_wait_in_the_device_ends_at_the_deadline():
    with Ranks(2, body_without_agreement, setup=Setup()) as ranks:
        ranks.await_mark("seen", [0])
        ranks.tell("ended")
        seen = ranks.values(timeout_s=40)
    assert seen[0].kind is not None


def body_closes_inside(me):
    """`close` ends a wait inside a collective of the device, within its bound."""
    fake_device.install()
    state = zensync.State()
    zensync.all_reduce(torch.ones(20000), state=state)
    if me.rank == VICTIM:
        me.await_told("ended")
        state.close()
        return None
    group = state.groups.of(torch.device("cpu"))
    started = state.call(lambda: lambda: group.all_gather(torch.ones(10), torch.ones(5)), "rows")
    assert not started.wait(0.3)
    state.close(2.0)
    assert started.wait(1.0)
    me.mark("seen")
    return started.error is not None


def test_close_ends_a_wait_in_the_device():
    with Ranks(2, body_closes_inside, setup=Setup()) as ranks:
        ranks.await_mark("seen", [0])
        ranks.tell("ended")
        assert ranks.values(timeout_s=40)[0]
