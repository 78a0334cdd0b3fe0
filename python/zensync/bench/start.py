"""Starting ranks together, with empty token buckets, and counting what a card moves.

Ranks of one machine share its monotonic clock: after a barrier they agree on an instant and start
at it. A link's full bucket would let the first bytes pass for nothing; until the instant each host
sends throw-away datagrams to the next one, just fast enough to keep both ends' buckets empty.
Ranks of several machines start after a barrier, without an instant; they have no such buckets.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..lab.load import machine_id
from ..lab.processes import host_of
from ..lab.slow_net import SlowNet
from .config import Config

_LEAD_S = 0.005  # from agreeing on an instant to that instant
_LEAD_A_RANK_S = 0.002
_REFILLS = 1.5  # the drain lasts as long as that many refills of a bucket
_PORT = 9  # "discard"; nobody answers there
_DATAGRAM_BYTES = 8192
_STEP_S = 0.0005
_EARLY_S = 0.0005  # the drain ends before the instant: nothing of it is under way then


class Starter:
    """Makes the ranks of the default group start at once; making it is a collective call."""

    def __init__(self, config: Config) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        machines: list[str | None] = [None] * self._size
        dist.all_gather_object(machines, machine_id())
        self._one_clock = len(set(machines)) == 1 and machines[0] != ""
        self._lead_s = _LEAD_S + _LEAD_A_RANK_S * self._size
        self._drain: Drain | None = None
        if config.rate_bits_per_s is not None and config.hosts > 1:
            refill_s = config.burst_bytes * 8 / config.rate_bits_per_s
            self._lead_s += _REFILLS * refill_s
            host = host_of(self._rank, config.ranks, config.hosts)
            if is_leader(self._rank, config):
                self._drain = Drain(config, (host + 1) % config.hosts)

    def wait(self) -> float:
        """Waits for all ranks; the common start, by this machine's monotonic clock."""
        dist.barrier()
        if not self._one_clock:
            return time.monotonic()
        at = torch.tensor([time.monotonic() + self._lead_s], dtype=torch.float64)
        dist.broadcast(at, 0)
        instant = float(at.item())
        if self._drain is not None:
            self._drain.run(instant - _EARLY_S)
        time.sleep(max(0.0, instant - time.monotonic()))
        return instant

    def close(self) -> None:
        """Lets go of sockets."""
        if self._drain is not None:
            self._drain.close()


class Drain:
    """Keeps the buckets from this host to the next one empty."""

    def __init__(self, config: Config, target_host: int) -> None:
        assert config.rate_bits_per_s is not None
        self._bytes_per_s = config.rate_bits_per_s / 8
        self._burst_bytes = config.burst_bytes
        # Bound and never read: what comes is dropped, and nobody is told that the port is closed.
        self._sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        self._sink.bind(("", _PORT))
        self._source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._source.connect((SlowNet.address(target_host), _PORT))

    def run(self, until: float) -> None:
        """Sends a burst, then as much as the link carries, until then."""
        payload = bytes(_DATAGRAM_BYTES)
        began = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < until:
            while sent < self._burst_bytes + (now - began) * self._bytes_per_s:
                self._source.send(payload)
                sent += _DATAGRAM_BYTES
            time.sleep(_STEP_S)

    def close(self) -> None:
        """Lets go of the sockets."""
        self._sink.close()
        self._source.close()


def is_leader(rank: int, config: Config) -> bool:
    """Whether it is the first rank of its host."""
    host = host_of(rank, config.ranks, config.hosts)
    return rank == 0 or host_of(rank - 1, config.ranks, config.hosts) != host


def card_bytes(interface: str) -> tuple[int, int]:
    """Bytes that a network card has sent and received so far."""
    folder = Path("/sys/class/net", interface, "statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())
