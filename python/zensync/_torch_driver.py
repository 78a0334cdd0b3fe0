"""The Python half of the torch driver (python/src/torch_driver.cpp): exchanges over a `Wire`.

On the wire, for each message and in the order of messages: a head of at most HEAD_BYTES, which is
the message's length (8 bytes, little-endian) and its beginning; then, if it is longer, a second
transfer of exactly the rest. A receiver posts a whole head for each message, since Gloo ends the
process when more comes than was posted; it learns the length from it, asks for memory, and posts
the rest. Heads go all at once. Of the rests two are under way at a time, in shifted rounds (first
from rank - 1, then rank - 2, …): a sender posts all of its own at once, because with Gloo bytes
leave when the receiver has posted.

Memory of messages is the core's and is not copied, but for heads and where the wire may touch it
later than it may be touched. Called from the engine's thread; `abort` and `close` from any.
Nothing here raises what a peer can cause: failures are returned as ErrorInfo, and drop the wire.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from . import _core, _torch_compat
from ._torch_wire import GlooWire, Wire, open_wire
from .errors import CapacityError, DeadlineError, PeerLostError, UnsupportedError

HEAD_BYTES = 64 * 1024

_LENGTH = struct.Struct("<Q")
_RESTS_UNDER_WAY = 2
_ENDED_S = 0.001  # to see whether a transfer has ended, once the connections are dropped
_HELLO = b"zensync torch driver 1"
_OTHER_BYTES = "what was received is not what was sent"


class Slot(Protocol):
    """Where one awaited message goes (`_core.RecvSlot`)."""

    @property
    def peer(self) -> int: ...

    def allocate(self, size_bytes: int) -> memoryview | _core.ErrorInfo:
        """Memory for a message of that size, or why it is not taken."""


class _Head:
    """A block for one head, used again and again. Zeros at first: paddings carry no secrets."""

    def __init__(self, size_bytes: int) -> None:
        block = bytearray(size_bytes)
        self.view = memoryview(block)
        self.tensor = torch.frombuffer(block, dtype=torch.uint8)


class _Transfer(NamedTuple):
    """A send or a receive under way. `tensor` is kept alive for it; `head` is there for heads."""

    peer: int
    work: Any
    tensor: torch.Tensor
    head: _Head | None = None
    finish: Callable[[], None] | None = None  # what is to be done when it has ended


class _FailedError(RuntimeError):
    """A transfer with `peer` failed, at the deadline or because of the connection."""

    def __init__(self, peer: int, late: bool, text: str) -> None:
        super().__init__(text)
        self.peer, self.late = peer, late


class _RefusedError(RuntimeError):
    """A message that its slot does not take."""

    def __init__(self, info: _core.ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class TorchLink:
    """One State's connections. `head_bytes` must be equal on all ranks."""

    def __init__(self, wire: Wire, rank: int, size: int, head_bytes: int = HEAD_BYTES) -> None:
        self._wire = wire
        self._rank, self._size = rank, size
        self._head_bytes = head_bytes
        self._spare: list[_Head] = []
        self._sent: list[_Transfer] = []  # of the last exchange
        self._awaited: list[_Transfer] = []  # receives under way, in the order they were posted
        self._dropped = False

    def exchange(
        self, sends: Sequence[tuple[int, memoryview]], recvs: Sequence[Slot], timeout_s: float
    ) -> _core.ErrorInfo | None:
        """Posts the sends, waits for the receives and for the sends of the exchange before."""
        until = time.monotonic() + timeout_s

        def run() -> None:
            before, self._sent = self._sent, []
            try:
                for peer, message in sends:
                    self._post(peer, message)
                self._receive_all(recvs, until)
            finally:
                self._sent = before + self._sent
            self._finish_sends(len(before), until)

        return self._guarded(run)

    def flush(self, timeout_s: float) -> _core.ErrorInfo | None:
        """Waits until all sends have left."""
        until = time.monotonic() + timeout_s
        return self._guarded(lambda: self._finish_sends(len(self._sent), until))

    def abort(self) -> None:
        """Drops the connections: an exchange under way ends, here and on the peers."""
        self._dropped = True
        self._wire.drop()

    def close(self) -> None:
        """Drops the connections for good."""
        self.abort()

    def greet(self, timeout_s: float) -> None:
        """One message round the ring. RuntimeError if it does not pass, or not as it was sent."""
        until = time.monotonic() + timeout_s
        came = _Hello((self._rank - 1) % self._size)
        try:
            self._post((self._rank + 1) % self._size, memoryview(bytearray(_HELLO)))
            self._receive_all([came], until)
            self._finish_sends(len(self._sent), until)
            if bytes(came.memory) != _HELLO:
                raise RuntimeError(_OTHER_BYTES)
        except BaseException:
            self._give_up()
            raise

    # ---- ends and failures

    def _guarded(self, run: Callable[[], None]) -> _core.ErrorInfo | None:
        """Runs a part of an exchange. Whatever fails, nothing touches the messages afterwards."""
        try:
            if self._dropped:
                return _core.ErrorInfo("internal", "the torch driver is closed")
            run()
        except _FailedError as why:
            return self._explain(why)
        except _RefusedError as why:
            self._give_up()
            return why.info
        except OverflowError as why:  # of a wire: more bytes than its backend can count
            self._give_up()
            info = _core.ErrorInfo(CapacityError.kind, str(why))
            info.rank = info.culprit = self._rank
            return info
        except BaseException:
            self._give_up()
            raise
        return None

    def _give_up(self) -> tuple[list[int], list[int]]:
        """Drops the wire and lets all transfers end. The peers of receives and of sends that had
        not ended by then."""
        self.abort()
        left = self._left(self._awaited), self._left(self._sent)
        self._awaited, self._sent, self._spare = [], [], []
        return left

    def _left(self, transfers: list[_Transfer]) -> list[int]:
        peers = []
        for transfer in transfers:
            try:
                self._wire.wait(transfer.work, _ENDED_S)
            except RuntimeError:
                peers.append(transfer.peer)
                if not self._wire.lets_go:
                    _torch_compat.keep_forever(transfer)
        return peers

    def _explain(self, why: _FailedError) -> _core.ErrorInfo:
        receiving = bool(self._awaited)
        delivering, taking = self._give_up()
        if not why.late:
            return _core.lost_info(self._rank, why.peer, str(why))
        if receiving:
            return _core.deadline_info(self._rank, delivering or [why.peer], [])
        return _core.deadline_info(self._rank, [], taking or [why.peer])

    def _wait(self, transfer: _Transfer, until: float) -> None:
        try:
            self._wire.wait(transfer.work, until - time.monotonic())
        except RuntimeError as why:
            late = time.monotonic() >= until
            raise _FailedError(transfer.peer, late, str(why)) from None
        if transfer.finish is not None:
            transfer.finish()

    # ---- sending

    def _take_head(self) -> _Head:
        return self._spare.pop() if self._spare else _Head(self._head_bytes)

    def _post(self, peer: int, message: memoryview) -> None:
        head = self._take_head()
        first = min(len(message), self._head_bytes - _LENGTH.size)
        _LENGTH.pack_into(head.view, 0, len(message))
        head.view[_LENGTH.size : _LENGTH.size + first] = message[:first]
        count = self._head_bytes if self._wire.pads else _LENGTH.size + first
        self._start_send(peer, head.tensor[:count], head)
        if len(message) > first:
            rest = torch.frombuffer(message, dtype=torch.uint8, offset=first)
            self._start_send(peer, rest if self._wire.lets_go else rest.clone(), None)

    def _start_send(self, peer: int, tensor: torch.Tensor, head: _Head | None) -> None:
        try:
            work = self._wire.send(peer, tensor)
        except RuntimeError as why:
            raise _FailedError(peer, False, str(why)) from None
        self._sent.append(_Transfer(peer, work, tensor, head))

    def _finish_sends(self, count: int, until: float) -> None:
        """Waits for the first `count` sends under way."""
        for transfer in self._sent[:count]:
            self._wait(transfer, until)
            if transfer.head is not None:
                self._spare.append(transfer.head)
        del self._sent[:count]

    # ---- receiving

    def _receive_all(self, recvs: Sequence[Slot], until: float) -> None:
        """The oldest slot of each peer first, then the next of those that have more."""
        queues: dict[int, deque[Slot]] = {}
        for slot in recvs:
            queues.setdefault(slot.peer, deque()).append(slot)
        peers = sorted(queues, key=lambda peer: (self._rank - peer) % self._size)
        while peers:
            self._receive([queues[peer].popleft() for peer in peers], until)
            peers = [peer for peer in peers if queues[peer]]

    def _receive(self, slots: list[Slot], until: float) -> None:
        """One message from each of some peers."""
        heads = []
        for slot in slots:
            head = self._take_head()
            heads.append(self._start_recv(slot.peer, head.tensor, head))
        rests: deque[_Transfer] = deque()
        for slot, transfer in zip(slots, heads, strict=True):
            self._wait(transfer, until)
            message = self._open_head(slot, transfer)
            if message is None:
                continue
            if len(rests) == _RESTS_UNDER_WAY:
                self._end_recv(rests.popleft(), until)
            rests.append(self._start_rest(slot.peer, message))
        while rests:
            self._end_recv(rests.popleft(), until)

    def _start_recv(
        self,
        peer: int,
        tensor: torch.Tensor,
        head: _Head | None = None,
        finish: Callable[[], None] | None = None,
    ) -> _Transfer:
        try:
            work = self._wire.recv(peer, tensor)
        except RuntimeError as why:
            raise _FailedError(peer, False, str(why)) from None
        transfer = _Transfer(peer, work, tensor, head, finish)
        self._awaited.append(transfer)
        return transfer

    def _end_recv(self, transfer: _Transfer, until: float) -> None:
        self._wait(transfer, until)
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        self._awaited = [one for one in self._awaited if one is not transfer]

    def _open_head(self, slot: Slot, transfer: _Transfer) -> memoryview | None:
        """Stores the beginning of a message whose head has come; the message if there is a rest."""
        self._forget(transfer)
        head = transfer.head
        assert head is not None
        (size_bytes,) = _LENGTH.unpack_from(head.view)
        message = slot.allocate(size_bytes)
        if isinstance(message, _core.ErrorInfo):
            raise _RefusedError(message)
        first = min(size_bytes, self._head_bytes - _LENGTH.size)
        message[:first] = head.view[_LENGTH.size : _LENGTH.size + first]
        self._spare.append(head)
        return message if size_bytes > first else None

    def _start_rest(self, peer: int, message: memoryview) -> _Transfer:
        first = self._head_bytes - _LENGTH.size
        rest = torch.frombuffer(message, dtype=torch.uint8, offset=first)
        if self._wire.lets_go:
            return self._start_recv(peer, rest)
        own = torch.empty_like(rest)

        def store() -> None:
            rest.copy_(own)

        return self._start_recv(peer, own, finish=store)


class _Hello:
    """The slot of `TorchLink.greet`."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.memory = memoryview(b"")

    def allocate(self, size_bytes: int) -> memoryview | _core.ErrorInfo:
        if size_bytes != len(_HELLO):
            return _core.ErrorInfo("unsupported", _OTHER_BYTES)
        self.memory = memoryview(bytearray(size_bytes))
        return self.memory


class LinkEnder:
    """Ends the making of a link from another thread, from when there is one."""

    def __init__(self) -> None:
        self._links: list[TorchLink] = []
        self._is_ended = False

    def add(self, link: TorchLink) -> None:
        self._links.append(link)
        if self._is_ended:
            link.abort()

    def end(self) -> None:
        self._is_ended = True
        for link in self._links:
            link.abort()


def open_link(
    group: dist.ProcessGroup,
    store: dist.Store,
    timeout_s: float,
    made: Callable[[TorchLink], None] = lambda _: None,
) -> TorchLink:
    """The link of one State over the ranks of `group` (2 or more), over keys of `store` that nobody
    else uses. A collective call. UnsupportedError, PeerLostError, DeadlineError, RuntimeError of
    torch.

    made: called with the link before its first message; its `abort` ends what is waited for then.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wire = open_wire(group, store, timeout_s)
    link = TorchLink(wire, rank, size)
    made(link)
    try:
        link.greet(timeout_s)
    except RuntimeError as why:
        if isinstance(why, _FailedError) and why.late:
            text = f"no message came over the torch driver's connections: {why}"
            raise DeadlineError(text, rank=rank) from why
        if isinstance(wire, GlooWire):
            raise PeerLostError(f"the torch driver failed to connect: {why}", rank=rank) from why
        raise UnsupportedError(
            f'backend "{_torch_compat.cpu_backend_name(group)}" does not pass messages between '
            f"ranks: {why}; use the native transport",
            rank=rank,
        ) from why
    return link
