"""Several States and groups at once: in other orders on each rank, from several threads, beside the
program's own collectives, and while one of them fails.
"""

import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zensync
from failing import (
    TRANSPORTS,
    Ranks,
    Setup,
    add_up,
    on_both,
    outcome_of,
    require_same,
    table,
    total,
)

TURNS = 30
both_transports = pytest.mark.parametrize("transport", TRANSPORTS)


def in_threads(*bodies):
    """Runs bodies at once; raises what the first of them raised."""
    raised = []

    def run(body):
        try:
            body()
        except BaseException as why:
            raised.append(why)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    if raised:
        raise raised[0]


def body_other_order(me, how):
    """Two States; every rank submits to them in an order of its own."""
    schemes = ("dense", "dense") if how == "dense" else ("auto", "balanced")
    states = [zensync.State(scheme=scheme) for scheme in schemes]
    full = how == "dense"
    if how == "threads":
        in_threads(
            *[
                lambda state=state: [add_up(me, state, turn) for turn in range(TURNS)]
                for state in states
            ]
        )
        return
    for turn in range(TURNS):
        order = [0, 1] if (me.rank + turn) % 2 else [1, 0]
        tensors = [table(me.rank, turn + which, full) for which in (0, 1)]
        works = [
            zensync.all_reduce(tensors[which], name="weights", state=states[which], async_op=True)
            for which in order
        ]
        for work in works:
            work.wait()
        for which, tensor in enumerate(tensors):
            assert torch.equal(tensor, total(range(me.size), turn + which, full)), (turn, which)


ORDERS = [(how, size) for how in ("sparse", "dense", "threads") for size in (2, 3)]


@pytest.mark.parametrize(
    ("transport", "how", "size"), on_both(ORDERS, [("sparse", 2), ("dense", 2), ("threads", 3)])
)
def test_two_states_in_another_order_on_each_rank(transport, how, size):
    with Ranks(size, body_other_order, how, setup=Setup(transport)) as ranks:
        ranks.values()


def sum_in_pair(state, rank, turn, full):
    tensor = table(rank, turn, full)
    zensync.all_reduce(tensor, name="pair's", state=state)
    assert torch.equal(tensor, total([1, 3], turn, full)), turn


def body_sub_group(me):
    """A State of ranks 1 and 3 works while the default group does, in other threads."""
    everyone = zensync.State()
    pair = dist.new_group([1, 3])

    def with_all():
        for turn in range(2 * TURNS):
            add_up(me, everyone, turn, full=turn % 3 == 0)

    def with_the_group():  # the program's own collectives on the default group
        for turn in range(TURNS):
            tensor = table(me.rank, turn)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total(range(4), turn)), turn

    def with_pair():
        with zensync.State(pair) as state:  # made while the others work
            for turn in range(TURNS):
                sum_in_pair(state, me.rank, turn, full=turn % 4 == 3)

    bodies = [with_all, with_the_group]
    in_threads(*bodies, *([with_pair] if me.rank in (1, 3) else []))
    # The program's own groups afterwards: all ranks are in unequal numbers of groups by now.
    for members in ([0, 1, 2, 3], [1, 2], [0, 3], [1, 3]):
        group = dist.new_group(members)
        if me.rank not in members:
            continue
        tensor = table(me.rank)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, total(members)), members
        tensor = table(me.rank)
        zensync.all_reduce(tensor, group=group)
        assert torch.equal(tensor, total(members)), members
    add_up(me, everyone, 0)
    dist.barrier()


@both_transports
def test_a_state_on_a_sub_group_beside_the_default_group(transport):
    with Ranks(4, body_sub_group, setup=Setup(transport)) as ranks:
        ranks.values()


def body_new_group_after(me):
    """The program makes groups with jobs of a State under way, and uses them."""
    with zensync.State() as state:
        for turn in range(5):
            tensor = table(me.rank, turn)
            work = zensync.all_reduce(tensor, name="weights", state=state, async_op=True)
            group = dist.new_group([0, 2])
            if me.rank != 1:
                own = torch.ones(5)
                dist.all_reduce(own, group=group)
                assert (own == 2).all()
            work.wait()
            assert torch.equal(tensor, total(range(3), turn)), turn
    dist.barrier()


@both_transports
def test_the_programs_own_groups_beside_a_state(transport):
    with Ranks(3, body_new_group_after, setup=Setup(transport)) as ranks:
        ranks.values()


def body_one_fails(me):
    """Rank 2 dies: the State of all fails, that of ranks 1 and 3 does not notice."""
    everyone, pair = zensync.State(), dist.new_group([1, 3])
    small = zensync.State(pair) if me.rank in (1, 3) else None
    add_up(me, everyone, 0)
    me.mark("busy")
    me.await_told("killed")
    outcome = outcome_of(lambda: add_up(me, everyone, 1))
    if small is not None:
        for turn in range(TURNS):
            sum_in_pair(small, me.rank, turn, full=turn % 4 == 3)
        assert small.last_error is None
    return outcome


@both_transports
def test_a_state_goes_on_when_another_fails(transport):
    with Ranks(4, body_one_fails, setup=Setup(transport)) as ranks:
        ranks.await_mark("busy")
        ranks.signal(2, signal.SIGKILL)
        ranks.tell("killed")
        require_same(ranks.values([0, 1, 3]), ["PeerLostError"], culprit=2)


def body_one_disagrees(me):
    """A State that fails by a mismatch leaves the other one as it was, and its successor works."""
    one, two = zensync.State(), zensync.State()
    for turn in range(3):
        add_up(me, one, turn)
        name = "weights" if me.rank else f"unlike {turn}"
        outcome = outcome_of(partial(add_up, me, two, 0, name=name))
        assert outcome.kind == "MismatchError", outcome
        add_up(me, one, turn)
        two.close()
        two = zensync.State()
        add_up(me, two, turn)


@both_transports
def test_a_failed_state_is_made_anew_beside_another(transport):
    with Ranks(3, body_one_disagrees, setup=Setup(transport)) as ranks:
        ranks.values()


def test_controls():
    """A thread that fails or hangs does not go unseen."""

    def fails():
        raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        in_threads(fails, lambda: None)
