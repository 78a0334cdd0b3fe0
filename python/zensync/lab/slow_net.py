"""A cluster with slow links on one machine, for measurements that loopback can't give.

Every host is a network namespace of its own (own UTS name, own loopback), joined by a veth pair
to a bridge that sits in one more namespace; a token bucket (`tc tbf`) on *both* ends of each pair
limits what a host sends and what it receives. Root and Debian's iproute2 are needed; nothing but
the Python standard library is used. Addresses exist inside these namespaces only.

Names carry the owner (`zs<pid>-<start time>-<label>-…`): the next `make` removes the networks of
owners that are no longer alive, so a killed run leaves nothing for long. All of one network is
made or removed by one process; the class isn't safe to share between threads. Whatever fails
raises `SlowNetError` with the text of the command that failed; what cannot be meant (a host beyond
the last one, a rate that `tc` does not know) is an `ArgumentsError`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

INTERFACE = "zs0"  # the one network card of every host
PORT = 29500  # where ranks meet; nobody else listens inside
_SUBNET = "10.213.77"
_MAX_HOSTS = 200
_KILL_ROUNDS = 5
_NAME = re.compile(r"zs(\d+)-(\d+)-([a-z0-9]+)-(?:h\d+|br)")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# As tc has them: bits, or bytes ("bps"), a second; bytes, or bits.
_RATE_UNIT = "(?:(?:[kmgt]i?)?(?:bit|bps))?"
_SIZE_UNIT = "(?:[kmg]b?|[kmg]bit|b)?"
# hostname may be missing or forbidden: the command runs all the same.
_NAMED_SHELL = 'hostname "$0" 2>/dev/null; exec "$@"'
# No IPv6, so that no neighbour discovery shows in the byte counters.
_NO_IPV6 = "f=/proc/sys/net/ipv6/conf/all/disable_ipv6; [ ! -e $f ] || echo 1 > $f"
_CONGESTION = "echo {0} > /proc/sys/net/ipv4/tcp_congestion_control"


class SlowNetError(RuntimeError):
    """A network could not be made, used or removed."""


class ArgumentsError(SlowNetError):
    """What was asked for makes no sense; nothing was tried."""


@dataclass(frozen=True)
class LinkSpec:
    """What each link can do; strings as `tc` takes them."""

    rate: str = "200mbit"
    burst: str = "128kb"  # a smaller bucket does not carry the rate; take 256kb at 1 Gbit/s
    limit: str = "8mb"
    congestion: str = "reno"  # bbr shares such links badly among the streams of an all-to-all

    def __post_init__(self) -> None:
        for name, example in (("rate", "200mbit"), ("burst", "128kb"), ("limit", "8mb")):
            text = getattr(self, name)
            unit = _RATE_UNIT if name == "rate" else _SIZE_UNIT
            found = re.fullmatch(rf"(\d+(?:\.\d+)?){unit}", text.lower())
            if found is None or float(found[1]) == 0:
                raise ArgumentsError(f"{name} {text!r} is not one such as {example}")


@dataclass(frozen=True)
class Counters:
    """Bytes and packets that a host's network card has sent and received so far."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise SlowNetError(f"`{' '.join(command)}` failed: {why}") from why
    if done.returncode != 0:
        raise SlowNetError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _start_time(pid: int) -> int:
    """When process `pid` began, in clock ticks since boot; 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The name of the program, in parentheses, may hold spaces: count from its end.
    return int(stat.rpartition(")")[2].split()[19])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _call(["ip", "netns", "list"]).splitlines() if line]


def _kill_inside(name: str) -> bool:
    """Whether there was a process to kill."""
    try:
        found = [int(pid) for pid in _call(["ip", "netns", "pids", name]).split()]
    except SlowNetError:
        return False
    others = [pid for pid in found if pid != os.getpid()]
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(others)


def _delete_namespace(name: str) -> None:
    """Ends what still runs in the namespace (its owner started it), then removes it."""
    for _ in range(_KILL_ROUNDS):  # a process may have forked meanwhile
        if not _kill_inside(name):
            break
    try:
        _call(["ip", "netns", "delete", name])
    except SlowNetError:
        if name in _namespaces():  # else another process was faster
            raise


def remove_stale() -> list[str]:
    """Removes all namespaces whose owner has ended. Returns their names."""
    stale = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != int(match[2]):
            _delete_namespace(name)
            stale.append(name)
    return stale


def why_not() -> str | None:
    """The reason why this process can't make a slow network, or None when it seems able to."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing (Debian: iproute2)"
    return None


class SlowNet:
    """`hosts` namespaces behind slow links; a context manager that also cleans up on signals."""

    def __init__(
        self,
        hosts: int,
        spec: LinkSpec | None = None,
        *,
        label: str = "a",
        owner: int | None = None,
    ) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ArgumentsError(f"hosts must be 1 to {_MAX_HOSTS}, not {hosts}")
        if not re.fullmatch("[a-z0-9]+", label):
            raise ArgumentsError(f"a label is made of a-z and 0-9, unlike {label!r}")
        self.hosts = hosts
        self.spec = spec or LinkSpec()
        self.owner = os.getpid() if owner is None else owner
        began = _start_time(self.owner)
        if began == 0:
            raise ArgumentsError(f"no process {self.owner} to own the network")
        self._run = f"zs{self.owner}-{began}-{label}"
        self._old_handlers: dict[int, Any] = {}

    def namespace(self, host: int) -> str:
        """The name of a host's namespace, which is its hostname as well."""
        if not 0 <= host < self.hosts:
            raise ArgumentsError(
                f"host {host}: there are {self.hosts}, and the first one is host 0"
            )
        return f"{self._run}-h{host}"

    @staticmethod
    def address(host: int) -> str:
        """The IPv4 address of a host; known inside the network only."""
        return f"{_SUBNET}.{host + 1}"

    @property
    def _bridge(self) -> str:
        return f"{self._run}-br"

    def _own(self) -> list[str]:
        return [name for name in _namespaces() if name.startswith(self._run + "-")]

    def is_made(self) -> bool:
        """Whether the namespaces of all hosts are there, whatever the state of the links."""
        return {self.namespace(host) for host in range(self.hosts)} <= set(self._own())

    def exists(self) -> bool:
        """Whether just this network is there, complete."""
        expected = {self._bridge, *(self.namespace(h) for h in range(self.hosts))}
        if set(self._own()) != expected:
            return False
        try:
            shown = json.loads(_call(["ip", "-n", self._bridge, "-j", "link", "show", "br0"]))
        except SlowNetError:
            return False
        return bool(shown) and shown[0].get("ifalias") == self._signature()

    def _signature(self) -> str:
        return f"{self.hosts} {self.spec.rate} {self.spec.burst} {self.spec.limit}"

    def make(self) -> None:
        """Makes the network, or leaves it alone if it exists already. Removes dead owners'."""
        reason = why_not()
        if reason:
            raise SlowNetError(f"a slow network {reason}")
        remove_stale()
        if self.exists():
            return
        self.remove()
        try:
            _call(["ip", "netns", "add", self._bridge])
            _call(["ip", "netns", "exec", self._bridge, "sh", "-ec", _NO_IPV6])
            _call(["ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge"])
            _call(["ip", "-n", self._bridge, "link", "set", "br0", "up"])
            for host in range(self.hosts):
                self._make_host(host)
            # Last of all: a network without this mark is not complete.
            mark = self._signature()
            _call(["ip", "-n", self._bridge, "link", "set", "br0", "alias", mark])
        except BaseException:
            self.remove()
            raise

    def _make_host(self, host: int) -> None:
        name, bridge, port = self.namespace(host), self._bridge, f"p{host}"
        shape = ["root", "tbf", "rate", self.spec.rate, "burst", self.spec.burst]
        shape += ["limit", self.spec.limit]
        pair = ["type", "veth", "peer", "name", INTERFACE, "netns", name]
        settings = f"{_NO_IPV6}; {_CONGESTION.format(self.spec.congestion)}"
        for command in (
            ["ip", "netns", "add", name],
            ["ip", "-n", bridge, "link", "add", port, *pair],
            ["ip", "netns", "exec", name, "sh", "-ec", settings],
            ["tc", "-n", bridge, "qdisc", "replace", "dev", port, *shape],
            ["tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, *shape],
            ["ip", "-n", bridge, "link", "set", port, "master", "br0", "up"],
            ["ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE],
            ["ip", "-n", name, "link", "set", "lo", "up"],
            ["ip", "-n", name, "link", "set", INTERFACE, "up"],
        ):
            _call(command)

    def remove(self) -> None:
        """Ends what runs inside and removes the network. No error if there is none."""
        for name in self._own():
            _delete_namespace(name)

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv`, prefixed so that it runs on `host`. It is exec'ed: the child is the program."""
        inside = ["ip", "netns", "exec", self.namespace(host)]
        if shutil.which("unshare"):
            inside += ["unshare", "--uts", "sh", "-c", _NAMED_SHELL, self.namespace(host)]
        return [*inside, *argv]

    def run(
        self, host: int, argv: Sequence[str], *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end and returns its status and output."""
        command = self.command(host, argv)
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )

    def environment(self, host: int) -> dict[str, str]:
        """Variables that a program on `host` needs to meet the others (torch's names)."""
        return {
            "MASTER_ADDR": self.address(0),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "ZS_HOST": str(host),
            "ZS_HOSTS": str(self.hosts),
            "ZS_RATE": self.spec.rate,
            "ZS_BURST": self.spec.burst,
        }

    def rank_environment(self, host: int, local_rank: int, ranks_per_host: int) -> dict[str, str]:
        """As `environment`, for one of several ranks of a host; ranks are counted host by host."""
        if not 0 <= local_rank < ranks_per_host:
            raise ArgumentsError(f"local rank {local_rank} of {ranks_per_host}")
        rank = host * ranks_per_host + local_rank
        return self.environment(host) | {
            "MASTER_PORT": str(PORT),
            "ZS_RANK": str(rank),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.hosts * ranks_per_host),
        }

    def set_link(self, host: int, up: bool, *, silent: bool = False) -> None:
        """Breaks a host's link, or mends it, however it was broken. Idempotent.

        Address, queue and counters of the host's card stay. Down: the card loses its carrier, as
        with a cable pulled. silent: the card sees nothing, but all that it sends is dropped behind
        it, and nothing comes; nobody is told (no reset), as when a machine loses power.
        """
        self.namespace(host)  # which refuses a host that is not there
        port = ["ip", "-n", self._bridge, "link", "set", f"p{host}"]
        if up:
            _call([*port, "up", "master", "br0"])
        else:
            _call([*port, *(["nomaster"] if silent else ["down"])])

    def counters(self, host: int) -> Counters:
        """What the host's card has moved since the network was made."""
        shown = ["ip", "-n", self.namespace(host), "-s", "-j", "link", "show", INTERFACE]
        stats = json.loads(_call(shown))[0]["stats64"]
        sent, received = stats["tx"], stats["rx"]
        return Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    def __enter__(self) -> Self:
        for number in SIGNALS:
            try:
                self._old_handlers[number] = signal.signal(number, leave)
            except ValueError:  # not the main thread: signals are somebody else's
                break
        try:
            self.make()
        except BaseException:
            self._restore_handlers()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in self._old_handlers:  # a second signal must not stop the clean-up
            signal.signal(number, signal.SIG_IGN)
        try:
            self.remove()
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()


def leave(number: int, _frame: FrameType | None) -> None:
    """Turns a signal into an exception, so that `with` blocks clean up."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
