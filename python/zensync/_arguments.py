"""What a program passes to a State, checked: each error names the argument and what it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _debug
from ._settings import disable_problem, transport_problem
from .errors import Error, UnsupportedError


def require_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default one. Error if there is none, or this rank is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise Error("torch.distributed is not initialised; call init_process_group first")
    found = dist.group.WORLD if group is None else group
    if isinstance(found, dist.ProcessGroup):
        return found
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise Error("this rank is not in the process group; only its members make a State")
    raise Error(f"a process group is needed, not {type(found).__name__} (see dist.new_group)")


def require_environment() -> None:
    """Error if the environment asks for what cannot be had."""
    if (problem := disable_problem()) is not None:
        raise Error(problem)
    if (problem := _debug.problem()) is not None:
        raise Error(problem)
    if (problem := transport_problem()) is not None:
        raise UnsupportedError(problem)


_LEAST_SILENCE_S = 3.0  # three heartbeats: a busy machine delays one or two


def require_silence(value: Any) -> float | None:
    """`silent_after_s` if it is long enough to tell a late heartbeat from none. Error if not."""
    seconds = require_seconds("silent_after_s", value)
    if seconds is not None and seconds < _LEAST_SILENCE_S:
        raise Error(f"silent_after_s= must be at least {_LEAST_SILENCE_S:g} s, not {value!r}")
    return seconds


def require_count(name: str, value: Any) -> int:
    """`value` if it is a whole number, 0 or more. Error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Error(f"{name}= must be a whole number, 0 or more, not {value!r}")
    return value


def checked_options(given: dict[str, Any], rank: int, size: int, disabled: bool) -> dict[str, Any]:
    """Arguments of a State as options of the engine. Error for what cannot be meant."""
    if not disabled:
        require_environment()
    names = host_names(given["hosts"], size)
    return {
        **given,
        "deadline_s": require_seconds("deadline_s", given["deadline_s"]),
        "silent_after_s": require_silence(given["silent_after_s"]),
        "hosts": names[rank] if names else None,
    }


def require_module(module: Any) -> None:
    """Error unless `module` is None or a torch.nn.Module."""
    if module is not None and not isinstance(module, torch.nn.Module):
        raise Error(f"module= must be a torch.nn.Module, not {type(module).__name__}")


def require_seconds(name: str, value: Any) -> float | None:
    """`value` if it can be a bound on a wait; None stays None. Error that names the argument."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise Error(f"{name}= must be a number of seconds above 0, not {value!r}")
    return float(value)


def host_names(hosts: Any, size: int) -> list[str] | None:
    """One text per rank, equal where hosts are; None if `hosts` is. Error if they do not fit."""
    if hosts is None:
        return None
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise Error(f"hosts= must be a list with one entry per rank, not {hosts!r}")
    if len(hosts) != size:
        raise Error(f"hosts= has {len(hosts)} entries for {size} ranks; give one per rank")
    for host in hosts:
        if not isinstance(host, str | int):
            raise Error(f"hosts= must have names or numbers, not {host!r}")
    return [f"host {host}" for host in hosts]
