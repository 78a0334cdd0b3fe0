"""Opens what a State needs on the network: the engine over the native mesh, and the dense group.

Collective: all ranks of the group make their States in the same order. Keys in the group's store
are unique for each State, by a count that every rank keeps in the store, so that they stay unique
when groups come and go.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _core, _torch_compat
from ._dense import DenseGroup
from .errors import raise_error

_DEFAULT_TIMEOUT_S = 1800.0
_LOOPBACK = "127.0.0.1"


class StoreRendezvous:
    """The Rendezvous of the core over a Store of torch. Values are bytes."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value at once; empty if there is none."""
        return self._store.get(key) if self._store.check([key]) else b""

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        """The value after waiting for it; None if it never came."""
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError as why:
            if self._store.check([key]):
                return self._store.get(key)
            if isinstance(why, dist.DistNetworkError):
                raise
            return None
        return self._store.get(key)

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


def open_mesh(
    group: dist.ProcessGroup, options: dict[str, Any], hosts: list[str] | None
) -> tuple[_core.Engine, DenseGroup]:
    """Engine and dense group of one State; `options` are the engine's (see _core.pyi)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = _torch_compat.group_store(group)
    timeout_s = _torch_compat.group_timeout_s(group, _DEFAULT_TIMEOUT_S)
    deadline_s = options.get("deadline_s") or timeout_s
    made = store.add(f"zensync/made/{rank}", 1)
    prefix = f"zensync/{made}"
    address = _LOOPBACK
    if size > 1:
        address = own_address(store, _core.environment()["interface_name"])
    engine = _core.open_engine(
        rank,
        size,
        StoreRendezvous(dist.PrefixStore(f"{prefix}/mesh", store)),
        {
            **options,
            "name": prefix,
            "address": address,
            "deadline_s": deadline_s,
            "timeout_s": min(timeout_s, deadline_s),
            "hosts": hosts[rank] if hosts else None,
        },
    )
    if isinstance(engine, _core.ErrorInfo):
        raise_error(engine)
    dense_store = dist.PrefixStore(f"{prefix}/dense", store)
    return engine, DenseGroup(dense_store, rank, size, deadline_s)
