"""Ranks that die, stop, raise or are interrupted while States are made, at every stage of it.

A rank gets to a stage in Python: `at_stage` makes it act there, in the doomed rank's process only.
The group's store is the test's, so no rank takes it along, but in the tests that say otherwise.
Errors after that, in calls, are in test_failures.py.
"""

import contextlib
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import zensync
from failing import Outcome, Ranks, Setup, bound, describe, outcome_of, require_same, table, total
from forking import poll, state_of
from zensync import _mesh, _torch_compat, _torch_driver

GONE_S = 10.0
INTERRUPT_S = 5.0
AT_ONCE_S = 3.0
STOPPED_S = 5.0
HANG_S = 5.0  # after the bound: it is a hang then, and is shown where
WORDS = "made to fail here"

# In the order in which a rank gets there. "recorded": its own record is in the store, nothing else
# is; "known": so are those of all ranks, and the next it does is to connect. "inside": its address
# is in the store, Gloo is about to connect.
CONTROL = ("control recorded", "control known")
MESH = ("mesh unrecorded", "mesh recorded", "mesh known")  # not over torch
LINK = ("link", "link inside")  # only over torch
DENSE = ("dense", "dense inside")
STAGES = {
    "native": CONTROL + MESH + DENSE,
    "torch": CONTROL + LINK + DENSE,
    "unset": CONTROL + MESH + DENSE,  # the native transport, unless ranks cannot connect at all
}


def param(*values, slow=False):
    return pytest.param(*values, marks=pytest.mark.slow if slow else ())


# ---- what a rank does


class Trap(dist.Store):
    """A store that calls `act` once something has been set: Gloo sets its address, then waits."""

    def __init__(self, store, act):
        super().__init__()
        self.store, self.act = store, act

    def set(self, key, value):
        self.store.set(key, value)
        self.act()

    def get(self, key):
        return self.store.get(key)

    def add(self, key, number):
        return self.store.add(key, number)

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, keys, *timeout):
        return self.store.wait(keys, *timeout)


def at_stage(me, stage, act):
    """Makes this rank call `act`, once, when the making of its next State gets to `stage`."""
    todo = [act]

    def act_once():
        if todo:
            todo.pop()()

    part, _, moment = stage.partition(" ")
    if part in ("control", "mesh"):
        act_at_record(me, part, moment, act_once)
    elif stage == "link":
        real_link = _torch_driver.open_link
        _torch_driver.open_link = lambda *args, **named: (act_once(), real_link(*args, **named))[1]
    else:
        over_torch = os.environ["ZENSYNC_TRANSPORT"] == "torch"
        place = 2 if over_torch and part == "dense" else 1
        act_at_gloo(place, moment == "inside", act_once)


def act_at_record(me, part, moment, act):
    """Acts before or after its own record is set, or after the last of all has been read."""
    rendezvous = _mesh.StoreRendezvous
    real_set, real_wait = rendezvous.set, rendezvous.wait

    def is_record(key, rank):
        return key.endswith(f"/rank/{rank}") and ("control" in key) == (part == "control")

    def set_record(self, key, value):
        if moment == "unrecorded" and is_record(key, me.rank):
            act()
        real_set(self, key, value)
        if moment == "recorded" and is_record(key, me.rank):
            act()

    def wait(self, key, timeout_s):
        value = real_wait(self, key, timeout_s)
        if moment == "known" and is_record(key, me.size - 1):
            act()
        return value

    rendezvous.set, rendezvous.wait = set_record, wait


def act_at_gloo(place, inside, act):
    """Acts before or inside the connect of the Gloo backend that is made as the `place`-th."""
    real = _torch_compat.make_gloo
    made = []

    def make_gloo(store, *args, **named):
        made.append(1)
        if len(made) == place:
            if inside:
                store = Trap(store, act)
            else:
                act()
        return real(store, *args, **named)

    _torch_compat.make_gloo = make_gloo


def strike(me, how):
    """What the doomed rank does at its stage: a signal to itself, an exception, or nothing."""
    me.mark("struck")
    if how == "raise":
        raise RuntimeError(WORDS)
    if how != "pass":
        os.kill(os.getpid(), how)


def hold(me):
    me.mark("held")
    me.await_told("go")


def join(me, port, ranks, name):
    """The default group over `ranks`, through the test's store."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"{me.folder.name}/{name}", store),
        rank=ranks.index(me.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=60),
    )


def make_and_use(me, ranks):
    """A State of `ranks`; a sparse and a dense sum over it."""
    with zensync.State() as state:
        for full in (False, True):
            tensor = table(me.rank, full=full)
            zensync.all_reduce(tensor, state=state)
            assert torch.equal(tensor, total(ranks, full=full)), f"rank {me.rank}: a wrong sum"


def body_doomed(me, port, how, stages, doomed):
    """`doomed` strikes at stages[0], the others are held at stages[1], if given, until "go". How
    the making of States ends, or their first use: they may be made when a rank dies in the last
    step of it. Then those that live make States again."""
    members = list(range(me.size))
    if not dist.is_initialized():
        join(me, port, members, "first")
    if me.rank == doomed:
        at_stage(me, stages[0], lambda: strike(me, how))
    elif stages[1:]:
        at_stage(me, stages[1], lambda: hold(me))
    began = time.monotonic()
    try:
        outcome = outcome_of(lambda: make_and_use(me, members))
    except Exception as why:
        if me.rank != doomed:
            raise
        outcome = describe(zensync.Error(f"{type(why).__name__}: {why}", culprit=doomed), began)
    if outcome.kind is None:
        return outcome
    if how != "raise":
        members.remove(doomed)
        dist.destroy_process_group()
        join(me, port, members, "second")
    make_and_use(me, members)
    return outcome


def body_stopped(me, port, stage, stopped):
    join(me, port, list(range(me.size)), "first")
    if me.rank == stopped:
        at_stage(me, stage, lambda: strike(me, signal.SIGSTOP))
    make_and_use(me, range(me.size))


# ---- what the tests ask


@pytest.fixture(scope="module")
def port():
    """Of a store that lives as long as the tests."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def setup(transport, group=False):
    return Setup(env={"ZENSYNC_TRANSPORT": transport.replace("unset", "")}, group=group)


def killed_and_seen(ranks, doomed, *, late=False):
    """How the making ended on the survivors of `doomed`, which kills itself, and by when it had
    to; they come after its death if `late`, when they are all at the stage where it died."""
    survivors = set(range(ranks.size)) - {doomed}
    if late:
        ranks.await_mark("held", survivors)
    end = ranks.end([doomed], timeout_s=20.0)[doomed]
    assert end.code == -signal.SIGKILL, f"exit code {end.code}, {end.error}\n{end.log}"
    since = time.monotonic() if late else float((ranks.folder / f"struck.{doomed}").read_text())
    ranks.tell("go")
    seen = ranks.values(survivors, timeout_s=bound(GONE_S) + HANG_S)
    return seen, since + bound(GONE_S)


def kills():
    """Quick are those where ranks differ in what they do."""
    all_three = {
        ("native", "control recorded"),
        ("native", "mesh known"),
        ("torch", "link inside"),
    }
    slow = {("native", "dense"), *(("torch", stage) for stage in (*CONTROL, "link", "dense"))}
    slow |= {("unset", stage) for stage in (*CONTROL, *MESH, "dense")}
    latecomers = {("native", "mesh known"), ("torch", "link inside")}
    for transport, stages in STAGES.items():
        for stage in stages:
            for doomed in range(3):
                quick = doomed == 1 and (transport, stage) not in slow
                quick = quick or (transport, stage) in all_three
                yield param(transport, 3, stage, doomed, "early", slow=not quick)
                quick = (transport, stage) in latecomers and doomed != 1
                yield param(transport, 3, stage, doomed, "late", slow=not quick)
    yield param("native", 2, "control known", 0, "late")
    yield param("native", 2, "mesh known", 1, "early")
    yield param("torch", 2, "link inside", 0, "early")
    yield param("unset", 2, "dense inside", 1, "early")


@pytest.mark.parametrize(("transport", "size", "stage", "doomed", "when"), list(kills()))
def test_a_rank_killed_while_states_are_made(transport, size, stage, doomed, when, port):
    late = when == "late"
    stages = [stage, stage.removesuffix(" inside")] if late else [stage]
    args = (port, signal.SIGKILL, stages, doomed)
    with Ranks(size, body_doomed, *args, setup=setup(transport)) as ranks:
        seen, until = killed_and_seen(ranks, doomed, late=late)
    require_same(seen, ["PeerLostError"], culprit=doomed, until=until)


@pytest.mark.parametrize(
    ("transport", "stage"),
    [
        param("native", "control known", slow=True),
        param("native", "mesh known"),
        param("native", "dense inside"),
        param("torch", "link inside"),
        param("unset", "mesh recorded", slow=True),
        param("unset", "dense inside", slow=True),
    ],
)
def test_a_killed_rank_that_had_the_store(transport, stage, port):
    """The control connections name it. Before they are there, nobody can tell it from a store that
    is out of reach: an error in time, of one class, that names nobody else."""
    args = (port, signal.SIGKILL, [stage], 0)
    with Ranks(3, body_doomed, *args, setup=setup(transport, group=True)) as ranks:
        seen, until = killed_and_seen(ranks, 0)
    if stage not in CONTROL:
        require_same(seen, ["PeerLostError"], culprit=0, until=until)
        return
    assert all(one.kind == "PeerLostError" and one.at <= until for one in seen.values()), seen
    assert {one.culprit for one in seen.values()} <= {0, None}, seen


one_of_three = pytest.mark.parametrize(
    ("transport", "stage", "doomed"),
    [
        param("native", "control recorded", 0),
        param("native", "control known", 0),
        param("native", "control known", 2),
        param("native", "mesh unrecorded", 1),
        param("native", "mesh known", 0),
        param("native", "mesh known", 2),
        param("native", "dense", 1),
        param("torch", "link", 0),
        param("torch", "link", 2),
        param("torch", "dense", 1),
        param("unset", "control known", 1),
        param("unset", "mesh known", 1, slow=True),
        param("unset", "dense", 2, slow=True),
    ],
)


@one_of_three
def test_a_rank_that_raises_while_states_are_made(transport, stage, doomed, port):
    with Ranks(3, body_doomed, port, "raise", [stage], doomed, setup=setup(transport)) as ranks:
        seen = ranks.values(timeout_s=20.0)
        (struck_at,) = ranks.await_mark("struck", [doomed])
    late = {rank: one for rank, one in seen.items() if one.at > struck_at + bound(AT_ONCE_S)}
    assert not late, f"struck at {struck_at}, ended only later: {late}"
    assert all(one.kind is not None and WORDS in one.message for one in seen.values()), seen
    assert all(one.culprit == doomed for rank, one in seen.items() if rank != doomed), seen


@one_of_three
def test_ctrl_c_on_a_rank_that_waits_for_the_others(transport, stage, doomed, port):
    """They are held at the stage that it has passed: it must end without their help."""
    others = {0, 1, 2} - {doomed}
    args = (port, "pass", [stage, stage], doomed)
    with Ranks(3, body_doomed, *args, setup=setup(transport)) as ranks:
        ranks.await_mark("held", others)
        ranks.await_mark("struck", [doomed])
        poll(lambda: state_of(ranks.pids[doomed])[0] == "S", 10.0, "it does not wait")
        began = ranks.signal(doomed, signal.SIGINT)
        end = ranks.end([doomed], timeout_s=bound(INTERRUPT_S) + HANG_S)[doomed]
        assert (end.error or "").startswith("KeyboardInterrupt"), end
        assert end.at - began < bound(INTERRUPT_S), f"{end.at - began:.1f} s"
        told_at = time.monotonic()
        ranks.tell("go")
        seen = ranks.values(others, timeout_s=bound(GONE_S) + HANG_S)
    until = told_at + bound(GONE_S)
    require_same(seen, ["PeerLostError", "Error"], culprit=doomed, until=until)


@pytest.mark.parametrize("transport", [param("native"), param("torch"), param("unset", slow=True)])
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(transport, port):
    """At all stages at once, each in processes of its own."""
    with contextlib.ExitStack() as stack:
        cases = {}
        for place, stage in enumerate(STAGES[transport]):
            args, stopped = (port, stage, place % 2), place % 2
            ranks = Ranks(2, body_stopped, *args, setup=setup(transport))
            cases[stage] = (stack.enter_context(ranks), stopped)
        for ranks, stopped in cases.values():
            ranks.await_mark("struck", [stopped])
            pid = ranks.pids[stopped]
            poll(lambda pid=pid: state_of(pid)[0] == "T", 10.0, "it did not stop")
        time.sleep(STOPPED_S)  # what is tested: the others wait for as long
        for ranks, stopped in cases.values():
            os.kill(ranks.pids[stopped], signal.SIGCONT)
        problems = []
        for stage, (ranks, stopped) in cases.items():
            try:
                ranks.values(timeout_s=15.0)
            except AssertionError as why:
                problems.append(f"rank {stopped} was stopped at {stage!r}: {why}")
    assert not problems, "\n".join(problems)


# ---- that these tests can fail


def body_passes(me, port, transport):
    """Stages that this rank got to, in their order."""
    join(me, port, list(range(me.size)), "first")
    seen = []
    for stage in STAGES[transport]:
        at_stage(me, stage, lambda stage=stage: seen.append(stage))
    make_and_use(me, range(me.size))
    return seen


@pytest.mark.parametrize("transport", STAGES)
def test_controls_of_the_stages(transport, port):
    """All ranks get to every stage, in this order; a State is made in spite of the traps."""
    with Ranks(3, body_passes, port, transport, setup=setup(transport)) as ranks:
        seen = ranks.values()
    assert all(stages == list(STAGES[transport]) for stages in seen.values()), seen


def test_controls_of_the_bounds(port):
    """A State that is made, and a rank that does not die, fail the test of the killed."""
    with Ranks(2, body_doomed, port, "pass", ["dense"], 0, setup=setup("native")) as ranks:
        with pytest.raises(AssertionError, match="exit code 0"):
            killed_and_seen(ranks, 0)
        made = ranks.values()
    assert made == {rank: Outcome(None, began=made[rank].began, at=made[rank].at) for rank in made}
    with pytest.raises(AssertionError):
        require_same(made, ["PeerLostError"], culprit=0)
