"""The slow-link network: made, limited, counted, removed, and not left behind. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from zensync.lab.slow_net import (
    ArgumentsError,
    LinkSpec,
    SlowNet,
    SlowNetError,
    remove_stale,
    why_not,
)

TOOL = Path(__file__).resolve().parents[2] / "tools/slow_net.py"
PAYLOAD_BYTES = 1_000_000

pytestmark = pytest.mark.skipif(
    why_not() is not None, reason=f"a slow-link network {why_not() or 'can be made'}"
)

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    while link.recv(1 << 16):
        pass
    link.sendall(b".")
"""
SEND = f"""
import socket, sys, time
link = socket.create_connection((sys.argv[1], 4000), timeout=20)
began = time.monotonic()
link.sendall(bytes({PAYLOAD_BYTES}))
link.shutdown(socket.SHUT_WR)
assert link.recv(1) == b"."
print(time.monotonic() - began)
"""
KEEP_OPEN = """
import subprocess, sys, time
from zensync.lab.slow_net import SlowNet
with SlowNet(2) as net:
    child = subprocess.Popen(net.command(1, ["sleep", "60"]))
    print(net.namespace(1), child.pid, flush=True)
    time.sleep(60)
"""


HALVES = f"""
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as server:
    print("ready", flush=True)
    link, _ = server.accept()
    seen = 0
    for size, said in (({PAYLOAD_BYTES // 2}, "half"), ({PAYLOAD_BYTES}, {PAYLOAD_BYTES})):
        while seen < size:
            seen += len(link.recv(min(size - seen, 1 << 16)) or sys.exit("too few"))
        print(said, flush=True)
"""
HALVES_SENT = f"""
import socket, sys
link = socket.create_connection((sys.argv[1], 4000), timeout=60)
link.sendall(bytes({PAYLOAD_BYTES // 2}))
sys.stdin.readline()
link.sendall(bytes({PAYLOAD_BYTES // 2}))
sys.stdin.readline()
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_ended(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def send(net: SlowNet, source: int, target: int) -> float:
    """Seconds that PAYLOAD_BYTES take from one host to another."""
    receiver = subprocess.Popen(
        net.command(target, [sys.executable, "-c", RECEIVE, net.address(target)]),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        done = net.run(source, [sys.executable, "-c", SEND, net.address(target)], timeout_s=30)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)
    finally:
        receiver.kill()
        receiver.wait()
        if receiver.stdout:
            receiver.stdout.close()


def test_links_are_slow_and_bytes_are_counted():
    with SlowNet(3, LinkSpec(rate="20mbit")) as net:
        before = [net.counters(host) for host in range(3)]
        seconds = send(net, 0, 1)
        after = [net.counters(host) for host in range(3)]
    # A full bucket, 131 kB, is free on the way; the rest takes 0.35 s.
    assert 0.3 < seconds < 5
    sent = after[0].sent_bytes - before[0].sent_bytes
    received = after[1].received_bytes - before[1].received_bytes
    assert PAYLOAD_BYTES < sent < 1.1 * PAYLOAD_BYTES
    assert PAYLOAD_BYTES < received < 1.1 * PAYLOAD_BYTES
    assert after[2].sent_bytes - before[2].sent_bytes < 1000
    assert after[2].received_bytes - before[2].received_bytes < 1000


def test_a_faster_link_takes_less_time():
    with SlowNet(2, LinkSpec(rate="1gbit", burst="256kb")) as net:
        assert send(net, 0, 1) < 0.3  # what the test above takes at least


def test_every_host_has_a_name_a_loopback_and_reno():
    with SlowNet(2) as net:
        words = "hostname; cat /proc/sys/net/ipv4/tcp_congestion_control; ip -br address"
        said = net.run(1, ["sh", "-c", words]).stdout
        assert net.namespace(1) in said
        assert "reno" in said
        assert "127.0.0.1/8" in said
        assert net.address(1) in said
        assert net.address(0) not in said


def test_make_again_changes_nothing_and_remove_again_is_no_error():
    net = SlowNet(2)
    net.make()
    try:
        # A file that only this very network has: made anew, it would be counted from 0.
        net.run(0, ["sh", "-c", "echo 3 > /proc/sys/net/ipv4/ip_forward"])
        net.make()
        assert net.exists()
        kept = net.run(0, ["cat", "/proc/sys/net/ipv4/ip_forward"]).stdout
        assert kept.strip() == "3"
        other = SlowNet(2, LinkSpec(rate="100mbit"))  # same name, another speed: made anew
        assert not other.exists()
        other.make()
        assert other.exists()
        assert not net.exists()
    finally:
        net.remove()
    net.remove()
    assert net.namespace(0) not in namespaces()


def test_a_failed_make_leaves_nothing():
    net = SlowNet(2, LinkSpec(congestion="quick"))
    with pytest.raises(SlowNetError, match="quick"):
        net.make()
    assert net.namespace(0) not in namespaces()


@pytest.mark.parametrize("wrong", [{"rate": "0mbit"}, {"burst": "many"}, {"limit": "8 mb"}])
def test_links_that_cannot_be_are_refused(wrong):
    with pytest.raises(ArgumentsError, match=f"{next(iter(wrong))} '.*' is not one such as"):
        LinkSpec(**wrong)


def test_rates_and_sizes_are_written_as_tc_has_them():
    for rate in ("1000000", "1.5Gbit", "10mibit", "25mbps", "1tbit", "100bit"):
        with SlowNet(1, LinkSpec(rate=rate, burst="256k", limit="1mb")) as net:
            assert net.exists()


@pytest.mark.parametrize("hosts", [0, 1000])
def test_impossible_sizes_are_refused(hosts):
    with pytest.raises(SlowNetError, match="hosts"):
        SlowNet(hosts)


@pytest.fixture
def other_run():
    """A process with a network, a namespace of it, and a process inside that."""
    runner = subprocess.Popen([sys.executable, "-c", KEEP_OPEN], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    name, pid = runner.stdout.readline().split()
    yield runner, name, int(pid)
    runner.kill()
    runner.wait()
    runner.stdout.close()
    remove_stale()


def test_a_killed_run_is_cleaned_up_by_the_next_make(other_run):
    runner, name, inside = other_run
    assert remove_stale() == []  # its owner lives
    assert is_running(inside)
    runner.kill()
    runner.wait()
    assert name in namespaces()
    with SlowNet(1):
        assert name not in namespaces()
        assert wait_until_ended(inside)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_the_network(other_run, number):
    runner, name, inside = other_run
    runner.send_signal(number)
    assert runner.wait(timeout=10) != 0
    assert name not in namespaces()
    assert wait_until_ended(inside)


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_the_command():
    try:
        made = tool("make", "--hosts", "2", "--label", "tool")
        assert made.returncode == 0, made.stderr
        names = json.loads(made.stdout)
        assert len(names) == 2
        assert all(str(os.getpid()) in name for name in names)  # it lives as long as its caller
        run = tool("exec", "--hosts", "2", "--host", "1", "--label", "tool", "--", "hostname")
        assert run.stdout.strip() in names
        counts = json.loads(tool("counters", "--hosts", "2", "--label", "tool").stdout)
        assert counts[1].keys() >= {"sent_bytes", "received_bytes"}
    finally:
        removed = tool("remove", "--hosts", "2", "--label", "tool")
    assert removed.returncode == 0
    assert not any(name in namespaces() for name in names)


def test_the_command_runs_one_program_a_host():
    run = tool("run", "--hosts", "3", "--", "sh", "-c", "echo $ZS_HOST of $ZS_HOSTS")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]
    assert tool("run", "--hosts", "2", "--", "false").returncode == 1
    assert tool("counters", "--hosts", "2", "--label", "none").returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["down", "--host", "5"], "host 5: there are 2"),
        (["run", "--host", "-1", "--", "true"], "host -1: there are 2"),
        (["run", "--rate", "fast", "--", "true"], "rate 'fast' is not one such as 200mbit"),
        (["make", "--hosts", "0"], "hosts must be 1 to"),
        (["make", "--label", "A"], "a label is made of"),
        (["make", "--owner", "0"], "no process 0 to own the network"),
        (["run", "--owner", "0", "--", "true"], "no process 0 to own the network"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(words, said):
    done = tool(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"slow_net: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_the_command_runs_several_ranks_a_host():
    words = "echo $ZS_HOST $LOCAL_RANK $RANK $ZS_RANK $WORLD_SIZE $MASTER_PORT"
    run = tool("run", "--hosts", "2", "--ranks-per-host", "2", "--", "sh", "-c", words)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [
        "0 0 0 0 4 29500",
        "0 1 1 1 4 29500",
        "1 0 2 2 4 29500",
        "1 1 3 3 4 29500",
    ]
    refused = tool("run", "--ranks-per-host", "0", "--", "true")
    assert refused.returncode == 2
    assert "at least 1" in refused.stderr


def test_commands_end_with_a_killed_run():
    words = "echo $$; exec sleep 60"
    command = [sys.executable, str(TOOL), "run", "--hosts", "2", "--", "sh", "-c", words]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert runner.stdout is not None
        inside = [int(runner.stdout.readline()) for _ in range(2)]
        assert all(map(is_running, inside))
    finally:
        runner.kill()
        runner.wait()
    runner.stdout.close()
    assert all(map(wait_until_ended, inside))
    name = f"zs{runner.pid}-"
    assert name in namespaces()
    assert any(stale.startswith(name) for stale in json.loads(tool("clean").stdout))
    assert name not in namespaces()


def test_an_interrupted_run_says_so_in_one_line():
    command = [sys.executable, str(TOOL), "run", "--hosts", "1", "--", "sh", "-c", "echo; sleep 60"]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    runner.stdout.readline()
    runner.send_signal(signal.SIGINT)
    assert runner.communicate(timeout=10)[1] == "slow_net: interrupted\n"
    assert runner.returncode == 130


def test_a_missing_tool_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    done = tool("clean")
    assert done.returncode == 1
    assert done.stderr.startswith("slow_net: `ip netns list` failed")
    assert len(done.stderr.splitlines()) == 1


def answers(net: SlowNet, source: int, target: int) -> bool:
    # Two of them: the first may be spent on finding the other's hardware address.
    words = "import socket, sys\nsocket.create_connection((sys.argv[1], 1), timeout=0.7)"
    done = net.run(source, [sys.executable, "-c", words, net.address(target)], timeout_s=10)
    return "ConnectionRefusedError" in done.stderr


@pytest.mark.parametrize("silent", [False, True])
def test_a_link_goes_down_and_comes_back(silent):
    with SlowNet(2) as net:
        show = ["sh", "-c", "ip -br address show dev zs0; tc qdisc show dev zs0"]
        before = net.run(1, show).stdout
        assert answers(net, 0, 1)
        for _ in range(2):  # again changes nothing
            net.set_link(1, False, silent=silent)
        assert not answers(net, 0, 1)
        assert not answers(net, 1, 0)
        during = net.run(1, show).stdout
        assert net.address(1) in during
        assert "rate 200Mbit" in during
        assert ("DOWN" in during) is not silent
        for _ in range(2):
            net.set_link(1, True)
        until = time.monotonic() + 5
        while not answers(net, 0, 1) and time.monotonic() < until:
            time.sleep(0.05)
        assert answers(net, 0, 1)
        assert answers(net, 1, 0)
        assert net.run(1, show).stdout == before
        with pytest.raises(SlowNetError, match="host 2"):
            net.set_link(2, False)


def test_a_connection_outlives_a_broken_link():
    """What is sent while the link is down leaves the sender, arrives nowhere, and comes later."""
    with SlowNet(2) as net, contextlib.ExitStack() as stack:
        receiver = talking(stack, net.command(1, [sys.executable, "-c", HALVES, net.address(1)]))
        assert receiver.stdout.readline() == "ready\n"
        sender = talking(stack, net.command(0, [sys.executable, "-c", HALVES_SENT, net.address(1)]))
        assert receiver.stdout.readline() == "half\n"
        net.set_link(1, False, silent=True)
        sent, received = net.counters(0).sent_bytes, net.counters(1).received_bytes
        sender.stdin.write("on\n")
        until = time.monotonic() + 20
        while net.counters(0).sent_bytes < sent + 5000 and time.monotonic() < until:
            time.sleep(0.02)
        assert net.counters(0).sent_bytes >= sent + 5000
        assert net.counters(1).received_bytes == received
        net.set_link(1, True)
        assert receiver.stdout.readline() == f"{PAYLOAD_BYTES}\n"
        assert net.counters(1).received_bytes > received + PAYLOAD_BYTES // 2


def talking(stack: contextlib.ExitStack, command: list[str]) -> subprocess.Popen[str]:
    """A process that is ended with the stack."""
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    stack.callback(child.wait)
    stack.callback(child.kill)
    return child
