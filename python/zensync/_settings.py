"""What the environment asks for and this installation does not have. Needs no torch."""

from __future__ import annotations

import os

from . import _core, _debug

TRANSPORT = "native"
TORCH = "torch"


def is_disabled() -> bool:
    """Whether ZENSYNC_DISABLE=1: the same calls, but the group's plain all-reduce and no mesh."""
    return bool(_core.environment()["disable"])


def disable_problem() -> str | None:
    """Why ZENSYNC_DISABLE is not understood; None if it is."""
    value = os.environ.get("ZENSYNC_DISABLE", "")
    return None if value in ("", "0", "1") else f'ZENSYNC_DISABLE is "{value}"; it must be 0 or 1'


def transport() -> str:
    """The transport that is asked for, or the default one."""
    return _core.environment()["transport"] or TRANSPORT


def transport_problem() -> str | None:
    """Why ZENSYNC_TRANSPORT cannot be had; None if it can."""
    wanted = transport()
    if wanted in (TRANSPORT, TORCH):
        return None
    return (
        f'ZENSYNC_TRANSPORT is "{wanted}", which is not in this version; '
        f'"{TRANSPORT}" and "{TORCH}" are'
    )


def problems() -> list[str]:
    """Everything that a State would refuse because of the environment."""
    found = [disable_problem(), transport_problem(), _core.info()["kernels_error"]]
    found.append(_debug.problem())
    verify = os.environ.get("ZENSYNC_VERIFY", "")
    if verify not in ("", "0", "1"):
        found.append(f'ZENSYNC_VERIFY is "{verify}"; it must be 0 or 1')
    return [problem for problem in found if problem]
