"""The State that `all_reduce` uses for a group when none is given."""

from __future__ import annotations

import threading

import torch.distributed as dist

from . import _torch_compat
from ._arguments import require_group
from ._mesh import lock_of
from .state import State

_defaults: dict[int, tuple[dist.ProcessGroup, State]] = {}
_defaults_lock = threading.Lock()


def default_state(group: dist.ProcessGroup | None) -> State:
    """The State that `all_reduce` uses for a group, made at its first use (a collective call).

    Closed at exit, or at the next call here after the group was destroyed. Made anew after an
    error, but not after one that says that a rank is gone or did not come. Groups do not wait for
    each other.
    """
    wanted = require_group(group)
    with lock_of(wanted):
        with _defaults_lock:
            gone = [
                key
                for key, (known, _) in _defaults.items()
                if not _torch_compat.group_is_alive(known)
            ]
            left = [_defaults.pop(key)[1] for key in gone]
            found = _defaults.get(id(wanted))
            if found is not None and found[1].has_failed():
                left.append(_defaults.pop(id(wanted))[1])
                found = None
        for state in left:
            state.close(1.0)
        if found is None:
            found = (wanted, State(wanted))
            with _defaults_lock:
                _defaults[id(wanted)] = found
    return found[1]
