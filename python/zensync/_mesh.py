"""Opens what a State needs on the network: the engine over its transport, and the dense group.

Collective: all ranks of the group make their States in the same order. What goes wrong on one rank
ends the attempt of all (`_attempt.py`), and the next one has keys of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from . import _core, _settings, _torch_compat, _torch_driver
from ._attempt import Attempt, PeerFailed, UnreachableError, poll
from ._connect import connect
from ._debug import INIT, logger
from ._dense import ASK_S, DenseGroup, await_fault
from ._groups import CONNECT_TIMEOUT_S, Groups, Opener
from .errors import Error, MismatchError, PeerLostError, UnsupportedError, make_error, raise_error

_DEFAULT_TIMEOUT_S = 1800.0
_LAST_WAIT_S = 0.1  # for an engine that has had no job
_LOOPBACK = "127.0.0.1"

_AGAIN_S = 60.0  # for the next way: all ranks were there a moment ago
_logger = logging.getLogger("zensync.net")

_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.RLock] = weakref.WeakKeyDictionary()
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def lock_of(group: dist.ProcessGroup) -> threading.RLock:
    """Held by the one thread that makes a State of `group`; groups do not wait for each other."""
    with _locks_lock:
        return _locks.setdefault(group, threading.RLock())


def _own_store(group: dist.ProcessGroup) -> dist.Store:
    """The group's store by a client of our own, which nobody waits in (`poll`): a client is locked
    while somebody does, and a fault goes to the store at any time. Hold the group's lock.

    Made once: a connection to the store costs two look-ups of a name, and can't be had any more
    when its host is gone.
    """
    if group not in _stores:
        _stores[group] = _torch_compat.own_client(_torch_compat.group_store(group))
    return _stores[group]


class StoreRendezvous:
    """The Rendezvous of the core over a Store of torch. Values are bytes.

    check: called while waiting, may raise.
    """

    def __init__(self, store: dist.Store, check: Callable[[], None] | None = None) -> None:
        self._store = store
        self._check = check or (lambda: None)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value at once; empty if there is none."""
        return self._store.get(key) if self._store.check([key]) else b""

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        """The value after waiting for it; None if it never came."""
        return self._store.get(key) if poll(self._store, key, timeout_s, self._check) else None

    def check(self) -> None:
        """Raises what ends the waits of this rank. Called where it waits for something else."""
        self._check()

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets `desired` where the value is `expected` (empty: none yet); the value afterwards."""
        return self._store.compare_set(key, expected, desired)  # type: ignore[arg-type]


def own_address(store: dist.Store, interface_name: str) -> str:
    """The numeric address that this rank's peers reach it by.

    That of `interface_name` (GLOO_SOCKET_IFNAME) if given, else the one that reaches the store's
    host, else MASTER_ADDR's, else this machine's name (as Gloo does it), else 127.0.0.1.
    """
    host, port = _torch_compat.store_address(store) or (os.environ.get("MASTER_ADDR", ""), 1)
    candidates = [host] if host else [socket.gethostname(), _LOOPBACK]
    found: Any = None
    for candidate in candidates:
        found = _core.address_towards(candidate, port, interface_name)
        if isinstance(found, str):
            return found
    return raise_error(found)


class Way(NamedTuple):
    """One way to carry exchanges. control: whether there are control connections beside it."""

    transport: str
    control: bool = True

    def describe(self) -> str:
        """In words, for logs."""
        if self.control:
            return f"the {self.transport} transport"
        return f"the {self.transport} transport without heartbeats: silence ends at deadline_s"


def ways() -> tuple[Way, ...]:
    """What is tried, in this order; the next only where ranks cannot connect to each other."""
    native, torch = Way(_settings.TRANSPORT), Way(_settings.TORCH)
    wanted = _core.environment()["transport"]
    if wanted == _settings.TRANSPORT:
        return (native,)
    rest = (torch, Way(_settings.TORCH, control=False))
    return rest if wanted == _settings.TORCH else (native, *rest)


class Opened(NamedTuple):
    """What a State has on the network."""

    engine: _core.Engine
    groups: Groups
    way: Way

    def say(self, scheme: str) -> Opened:
        """Logs what is active."""
        logger(INIT).info(
            "zensync: rank %d of %d over %s, kernels %s, scheme %s",
            self.groups.cpu.rank,
            self.groups.cpu.size,
            self.way.describe(),
            _core.info()["kernels_active"],
            scheme,
        )
        return self


def open_mesh(group: dist.ProcessGroup, choose: Callable[[], dict[str, Any]]) -> Opened:
    """What one State has. `choose` gives the engine's options (see _core.pyi);
    what it raises, the peers of this rank are told."""
    try:
        with lock_of(group):
            return _open_at_last(group, choose)
    except Error:
        raise
    except RuntimeError as why:  # of torch
        raise PeerLostError(f"the process group failed to connect: {why}") from why


def _open_at_last(group: dist.ProcessGroup, choose: Callable[[], dict[str, Any]]) -> Opened:
    store = _own_store(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    timeout_s = _torch_compat.group_timeout_s(group, _DEFAULT_TIMEOUT_S)
    until = time.monotonic() + timeout_s
    left = deque(ways())
    while True:
        attempt = Attempt(store, rank, size)
        try:
            options = choose()
            deadline_s = options["deadline_s"] or timeout_s
            until = min(until, time.monotonic() + deadline_s)
            options = {**options, "deadline_s": deadline_s, "name": attempt.prefix}
            opened = _Opening(attempt, group, store, until).run(left[0], options)
            return opened.say(options["scheme"])
        except PeerFailed as why:
            if attempt.is_unreachable():
                attempt.call_roll()
            if _goes_on(attempt, left):
                until = min(until, time.monotonic() + _AGAIN_S)
                continue
            if not attempt.is_missing() or time.monotonic() >= until:
                raise why.error from None
        except UnreachableError as why:
            attempt.fail(why)
            attempt.call_roll()
            if not _goes_on(attempt, left):
                raise attempt.first_error(why.error) from None
            until = min(until, time.monotonic() + _AGAIN_S)
        except MismatchError as why:  # each rank saw a difference of its own
            attempt.fail(why)
            raise attempt.first_error(why) from None
        except BaseException as why:
            attempt.fail(why)
            raise


def _goes_on(attempt: Attempt, left: deque[Way]) -> bool:
    """Whether all ranks try the next way, because this attempt's could not be had; says so."""
    if not attempt.is_unreachable() or len(left) < 2:
        return False
    failed = left.popleft()
    _logger.warning(
        "zensync: %s cannot be had: %s; trying %s",
        failed.describe(),
        attempt.why(),
        left[0].describe(),
    )
    return True


def refuse_mesh(group: dist.ProcessGroup, why: Error) -> None:
    """In place of `open_mesh`: ranks that try it are told that this one does not. Never waits."""
    store = _torch_compat.group_store(group)
    with contextlib.suppress(RuntimeError), lock_of(group):
        Attempt(store, dist.get_rank(group), dist.get_world_size(group)).fail(why)


class _Opening:
    """One attempt, and the time until which it may take."""

    def __init__(
        self, attempt: Attempt, group: dist.ProcessGroup, store: dist.Store, until: float
    ) -> None:
        self._attempt, self._group, self._store, self._until = attempt, group, store, until
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def run(self, way: Way, options: dict[str, Any]) -> Opened:
        self._attempt.check()
        engine = self._open_engine(way, options)
        try:
            dense = self._open_dense(engine, options["deadline_s"])
            keys = f"{self._attempt.prefix}/device"
            opener = Opener(self._group, keys, engine, options["deadline_s"])
            return Opened(engine, Groups(dense, opener), way)
        except BaseException as why:
            error = self._settled(engine, why)
            engine.close(_LAST_WAIT_S)
            if error is why:
                raise
            raise error from why

    def _settled(self, engine: _core.Engine, why: BaseException) -> BaseException:
        """What ended the making of a State whose engine runs already: a peer may have gone.

        Peers whose States are made are told, so that they do not blame this rank for leaving.
        """
        if not isinstance(why, RuntimeError):  # a note of the attempt, or an interrupt
            return why
        if (fault := await_fault(engine, ASK_S)) is not None:
            return fault
        text = f"rank {self._rank} could not make its State: {why}"
        own = why if isinstance(why, Error) else PeerLostError(text)
        info = _core.ErrorInfo(own.kind, text)
        info.rank = self._rank
        info.culprit = self._rank if own.culprit is None else own.culprit
        engine.abort(info)
        return why

    def _left_s(self) -> float:
        return max(self._until - time.monotonic(), 0.001)

    def _check(self, fault: Callable[[], _core.ErrorInfo | None]) -> None:
        """Raises what the notes, or the control connections, say of the others."""
        if (known := fault()) is not None:
            raise make_error(known)
        self._attempt.check()

    def _open_link(self, fault: Callable[[], _core.ErrorInfo | None]) -> _torch_driver.TorchLink:
        """Called by the core."""
        timeout_s = min(self._left_s(), CONNECT_TIMEOUT_S)  # all ranks have come
        ender = _torch_driver.LinkEnder()
        return connect(
            lambda store: _torch_driver.open_link(self._group, store, timeout_s, ender.add),
            self._keys("link"),
            lambda: self._check(fault),
            ender.end,
        )

    def _keys(self, name: str) -> dist.Store:
        """Those that only this attempt has."""
        return dist.PrefixStore(f"{self._attempt.prefix}/{name}", self._store)

    def _open_engine(self, way: Way, options: dict[str, Any]) -> _core.Engine:
        options = {"connect_timeout_s": CONNECT_TIMEOUT_S, "control": way.control, **options}
        if self._size > 1 and way.transport == _settings.TORCH:
            options["open_link"] = self._open_link
        address = _LOOPBACK
        if self._size > 1:
            address = own_address(self._store, _core.environment()["interface_name"])
        rendezvous = StoreRendezvous(self._keys("mesh"), self._attempt.check)
        engine = _core.open_engine(
            self._rank,
            self._size,
            rendezvous,
            {"address": address, **options, "timeout_s": self._left_s()},
        )
        if not isinstance(engine, _core.ErrorInfo):
            return engine
        if engine.kind == UnsupportedError.kind and _core.kernels_error() is None:
            raise UnreachableError(make_error(engine))
        return raise_error(engine)

    def _open_dense(self, engine: _core.Engine, deadline_s: float) -> DenseGroup:
        if self._size == 1:
            return DenseGroup(None, engine, self._rank, self._size, deadline_s)

        def check() -> None:
            self._check(lambda: engine.error)

        self._attempt.meet(self._left_s(), check)
        timeout_s = min(deadline_s, CONNECT_TIMEOUT_S)  # all ranks have come
        gloo = connect(
            lambda store: _torch_compat.make_gloo(store, self._rank, self._size, timeout_s),
            self._keys("dense"),
            check,
        )
        return DenseGroup(gloo, engine, self._rank, self._size, deadline_s)
