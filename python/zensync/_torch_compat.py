"""Every private interface of torch that zensync uses, and every habit of it that zensync relies on.

Nothing else in the package touches a name of torch that starts with an underscore. Each function
here has a test in tests/python/test_compat.py that trips when torch moves it.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store through which the ranks of `group` found each other; keys are the group's own."""
    if group is dist.group.WORLD:
        return distributed_c10d._get_default_store()
    return distributed_c10d._get_process_group_store(group)


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    return group in distributed_c10d._world.pg_map


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of the TCPStore below `store`; None if it is a store of another kind."""
    inner: Any = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.TCPStore):
        return inner.host, inner.port
    return None


def group_timeout_s(group: dist.ProcessGroup, otherwise_s: float) -> float:
    """The time-out of the group's CPU backend in seconds; `otherwise_s` where it has none."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return otherwise_s
    return timeout.total_seconds()


def make_gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """A Gloo backend over keys of `store` that nobody else uses. A collective call.

    Not `dist.new_group`: its name is made from the number of groups that this process has had,
    which need not be equal on the ranks of a sub-group, and comes back after a group was destroyed.
    """
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def wait_slice(work: Any, seconds: float) -> bool:
    """Waits for a Gloo collective for at most `seconds`; whether it has ended. Raises its error.

    An all-reduce whose wait expires goes on, and may be waited for again.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def keep_forever(thing: object) -> None:
    """Never destroys `thing`: a Gloo group's destructor would wait for a stuck collective."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def coo_indices(tensor: torch.Tensor) -> torch.Tensor:
    """int64[sparse_dim, entries] of a COO tensor, coalesced or not."""
    return tensor._indices()


def coo_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values [entries, *dense shape] of a COO tensor, coalesced or not."""
    return tensor._values()
