"""The failure protocol at its default thresholds: ranks and links that are silent for 20 or 30 s
and come back, and hosts that are gone without a word. All at the same time, once per transport.

Ranks of the link tests are hosts of the slow-link network, which needs root.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time

import pytest
import zensync
from failing import (
    TRANSPORTS,
    End,
    Ranks,
    Setup,
    add_up,
    bound,
    outcome_of,
    require_same,
    until_told,
)
from zensync.lab.slow_net import INTERFACE, LinkSpec, SlowNet, why_not

pytestmark = pytest.mark.slow

SIZE = 3
STOP_S, SLEEP_S, CUT_S = 20.0, 30.0, 20.0
BEAT_S = 1.0
SILENT_S = 5.0  # of States whose host goes for good; the others have the default
GONE = {"gone": False, "gone silent": True}  # how: the cable is pulled; or `silent` of `set_link`
GONE_S = 10.0
PHASES = "push|pull|gather|doubl|return|reduce|agree|exchange|header"
needs_network = pytest.mark.skipif(
    why_not() is not None, reason=f"a slow-link network {why_not() or 'can be made'}"
)


def body_sums(me, scheme, silent_after_s=60):
    """Sums until the test tells to finish; what ended them."""
    state = zensync.State(scheme=scheme, silent_after_s=silent_after_s)
    outcome = outcome_of(lambda: until_told(me, state, full=scheme == "dense"))
    me.mark("over")
    if silent_after_s != 60:
        me.await_told("end")  # its end must not be what tells the others
    state.close()
    return outcome


def body_sleeps(me, scheme):
    """Rank 1 is away between two sums, as when it saves or compiles."""
    state = zensync.State(scheme=scheme)
    add_up(me, state, 0, full=scheme == "dense")
    me.mark("busy")
    if me.rank == 1:
        time.sleep(SLEEP_S)  # the test's subject
    outcome = outcome_of(
        lambda: [add_up(me, state, turn, full=scheme == "dense") for turn in (1, 2)]
    )
    state.close()
    return outcome


def require_warnings(end: End, culprit: int) -> None:
    """A warning names the rank, the tensor and the phase; none names another rank as silent."""
    assert end.warnings, f"no warning: {end}"
    for words in (rf"\brank {culprit}\b", "weights", PHASES):
        assert any(re.search(words, text) for text in end.warnings), f"{words}: {end.warnings}"
    assert len(end.warnings) < 20, f"too many warnings: {end.warnings[:20]}"


# ---- the slow-link network


def setup_in(net: SlowNet, transport: str) -> Setup:
    names = tuple(net.namespace(host) for host in range(SIZE))
    env = {"MASTER_ADDR": net.address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
    return Setup(
        transport, env=env, namespaces=names, address=net.address(0), group_timeout_s=120.0
    )


def namespaces_of(net: SlowNet) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    prefix = net.namespace(0).removesuffix("h0")
    return [line for line in listed.stdout.splitlines() if line.startswith(prefix)]


class Scenes:
    """All groups of ranks at once. Times are of the clock that processes share."""

    def __init__(self, transport: str, stack: contextlib.ExitStack) -> None:
        self.nets: dict[str, SlowNet] = {}
        self.cut_at: dict[str, float] = {}
        self.outcomes: dict[str, dict[int, End] | AssertionError] = {}
        setup = Setup(transport, group_timeout_s=120.0)
        started = {
            "stop": Ranks(SIZE, body_sums, "balanced", setup=setup),
            "stop dense": Ranks(SIZE, body_sums, "dense", setup=setup),
            "sleep": Ranks(SIZE, body_sleeps, "balanced", setup=setup),
            "sleep dense": Ranks(SIZE, body_sleeps, "dense", setup=setup),
        }
        self.ranks = {name: stack.enter_context(ranks) for name, ranks in started.items()}
        if why_not() is None:
            spec = LinkSpec(rate="1gbit", burst="256kb")
            for name in ("cut", *GONE):
                net = stack.enter_context(SlowNet(SIZE, spec, label=name.replace(" ", "")))
                silent_after_s = SILENT_S if name in GONE else 60
                ranks = Ranks(
                    SIZE, body_sums, "balanced", silent_after_s, setup=setup_in(net, transport)
                )
                self.nets[name], self.ranks[name] = net, stack.enter_context(ranks)
        self.play()

    def play(self) -> None:
        for ranks in self.ranks.values():
            ranks.await_mark("busy")
        for name in ("stop", "stop dense"):
            self.ranks[name].signal(1, signal.SIGSTOP)
        for name, net in self.nets.items():
            self.cut_at[name] = time.monotonic()
            net.set_link(1, False, silent=GONE.get(name, False))
        time.sleep(max(STOP_S, CUT_S))  # the tests' subject
        if self.nets:
            self.nets["cut"].set_link(1, True)
        for name in ("stop", "stop dense"):
            self.ranks[name].signal(1, signal.SIGCONT)
        for name in ("stop", "stop dense", "cut"):
            if name in self.ranks:
                self.ranks[name].tell("finish")
        for name, ranks in self.ranks.items():
            try:
                if name in GONE:
                    # Its process goes where nobody can see it: no reset comes.
                    ranks.signal(1, signal.SIGKILL)
                    ranks.await_mark("over", [0, 2])
                    ranks.tell("end")
                self.outcomes[name] = ranks.end([0, 2] if name in GONE else None)
            except AssertionError as why:  # of one scene, not of the others
                self.outcomes[name] = why

    def ends(self, name: str) -> dict[int, End]:
        """How the ranks of one scene ended."""
        outcome = self.outcomes[name]
        if isinstance(outcome, AssertionError):
            raise outcome
        return outcome


@pytest.fixture(scope="module", params=TRANSPORTS)
def scenes(request):
    with contextlib.ExitStack() as stack:
        played = Scenes(request.param, stack)
        yield played
    for name, net in played.nets.items():
        assert namespaces_of(net) == [], f"left of {name}"


def require_slow(ends: dict[int, End], least_s: float) -> None:
    """Right sums (the bodies check them) and no error on all ranks, a warning on those who waited
    for rank 1."""
    for rank, end in ends.items():
        assert end.code == 0, f"rank {rank}: {end}"
        assert end.value.kind is None, f"rank {rank}: {end.value}"
        if rank != 1:
            assert end.value.seconds > least_s - 2, f"rank {rank} did not wait: {end.value}"
            require_warnings(end, culprit=1)


@pytest.mark.parametrize("scheme", ["", " dense"])
def test_a_rank_that_is_stopped_for_20_s(scenes, scheme):
    require_slow(scenes.ends("stop" + scheme), STOP_S)


@pytest.mark.parametrize("scheme", ["", " dense"])
def test_a_rank_that_sleeps_for_30_s(scenes, scheme):
    require_slow(scenes.ends("sleep" + scheme), SLEEP_S)
    assert scenes.ends("sleep" + scheme)[1].warnings == []


@needs_network
def test_a_link_that_is_down_for_20_s(scenes):
    require_slow(scenes.ends("cut"), CUT_S)


@needs_network
@pytest.mark.parametrize("name", GONE)
def test_a_host_that_is_gone_without_a_word(scenes, name):
    """All survivors name it, once `silent_after_s` is over; no reset tells anybody before."""
    ends, cut_at = scenes.ends(name), scenes.cut_at[name]
    assert all(end.code == 0 for end in ends.values()), ends
    outcomes = {rank: end.value for rank, end in ends.items()}
    until = cut_at + SILENT_S + bound(GONE_S)
    require_same(outcomes, ["PeerLostError"], culprit=1, until=until)
    # The last beat came up to a beat before the cut, and silence is counted in whole beats.
    since = cut_at + SILENT_S - 2 * BEAT_S
    assert all(one.at > since for one in outcomes.values()), (cut_at, outcomes)


# ---- that these checks can fail


def test_controls_of_the_warnings():
    good = 'rank 1 is silent for 10 s: tensor "weights", push'

    def end(*warnings):
        return End(0, 0.0, None, None, list(warnings), None, "")

    require_warnings(end(good), 1)
    for bad in (
        [],
        [good.replace("rank 1", "rank 10")],
        [good.replace("weights", "another")],
        [good.replace("push", "something")],
        [good] * 20,
    ):
        with pytest.raises(AssertionError):
            require_warnings(end(*bad), 1)


@needs_network
@pytest.mark.parametrize("silent", [False, True])
def test_control_of_the_cable(silent):
    with SlowNet(2, label="cable") as net:
        connect = "import socket,sys; socket.create_connection((sys.argv[1], 9), 2)"
        ping = ["python3", "-c", connect, net.address(1)]
        refused = net.run(0, ping, timeout_s=20).stderr
        net.set_link(1, False, silent=silent)
        cut = net.run(0, ping, timeout_s=20).stderr
        net.set_link(1, True)
        assert "ConnectionRefusedError" in refused
        assert "ConnectionRefusedError" not in cut
        assert "ConnectionRefusedError" in net.run(0, ping, timeout_s=20).stderr
        assert len(namespaces_of(net)) == 3
    assert namespaces_of(net) == []
