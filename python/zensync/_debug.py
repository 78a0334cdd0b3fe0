"""What is seen from outside: ZENSYNC_DEBUG, as people know NCCL_DEBUG, and spans for profilers.

All lines go through loggers below `zensync`, one for each subsystem, so that a program can also
take them by Python's logging. Set up once, when zensync is imported; needs no torch.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from . import _core

TRACE = 5  # below logging.DEBUG: a line for each call
LEVELS = {"VERSION": logging.INFO, "WARN": logging.WARNING, "INFO": logging.INFO, "TRACE": TRACE}
INIT, ENV, NET, COLL, TUNING = "INIT", "ENV", "NET", "COLL", "TUNING"
SUBSYSTEMS = (INIT, ENV, NET, COLL, TUNING)  # docs/debugging.md says what each has
_VARIABLES = (
    "ZENSYNC_CPU_TARGET", "ZENSYNC_DATA", "ZENSYNC_DEBUG", "ZENSYNC_DEBUG_FILE",
    "ZENSYNC_DEBUG_SUBSYS", "ZENSYNC_DISABLE", "ZENSYNC_TRANSPORT", "ZENSYNC_VERIFY",
    "GLOO_SOCKET_IFNAME",
)  # fmt: skip
_ROOT = logging.getLogger("zensync")


def logger(subsystem: str) -> logging.Logger:
    """The logger of a subsystem."""
    return _ROOT.getChild(subsystem.lower())


def _asked(which: str) -> str:
    """Not by the core, which would read all settings now: a program may set others later."""
    return os.environ.get(f"ZENSYNC_DEBUG{which}", "")


_TUNING, _CALLS = logger(TUNING), logger(COLL)  # asked for every call


def problem() -> str | None:
    """Why ZENSYNC_DEBUG or ZENSYNC_DEBUG_SUBSYS is not understood; None if they are."""
    level = _asked("")
    if level and level.upper() not in LEVELS:
        return f'ZENSYNC_DEBUG is "{level}"; it must be {", ".join(LEVELS)}'
    unknown = _names(_asked("_SUBSYS")) - {"ALL", *SUBSYSTEMS}
    if unknown:
        known = ", ".join(SUBSYSTEMS)
        return f"ZENSYNC_DEBUG_SUBSYS has {', '.join(sorted(unknown))}; known are {known} and ALL"
    return None


def set_up() -> None:
    """Adds the handler that ZENSYNC_DEBUG asks for; nothing where it is not set.

    Raises nothing: a file that cannot be opened is a warning; what is not understood has no effect
    until a State refuses it.
    """
    level = _asked("").upper()
    if not level or problem() is not None:
        return
    handler, failure = _handler(_asked("_FILE"))
    handler.setFormatter(_Formatter())
    handler.addFilter(_filter(_asked("_SUBSYS")))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(LEVELS[level])
    _ROOT.propagate = False  # else a program that logs has each line twice
    if failure:
        _ROOT.warning("%s", failure)
    logger(INIT).info("version %s", _core.__version__)
    if level == "VERSION":
        _ROOT.setLevel(logging.WARNING)
        return
    for name in _VARIABLES:
        if (value := os.environ.get(name)) is not None:
            logger(ENV).info("%s=%s", name, value)


class _Formatter(logging.Formatter):
    """`host:pid zensync LEVEL SUBSYSTEM text`."""

    def __init__(self) -> None:
        super().__init__()
        self._start = f"{socket.gethostname()}:{os.getpid()} zensync"

    def format(self, record: logging.LogRecord) -> str:
        level = "WARN" if record.levelno >= logging.WARNING else "INFO"
        level = "TRACE" if record.levelno <= TRACE else level
        subsystem = record.name.removeprefix(_ROOT.name).lstrip(".").upper()
        text = record.getMessage().removeprefix("zensync: ")
        return " ".join(filter(None, (self._start, level, subsystem, text)))


def _handler(path: str) -> tuple[logging.Handler, str]:
    """Where lines go, and why it is not where they were to go; %h is the host, %p the process."""
    if not path:
        return logging.StreamHandler(), ""
    name = path.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    try:
        return logging.FileHandler(name, encoding="utf-8"), ""
    except OSError as why:
        return logging.StreamHandler(), f"ZENSYNC_DEBUG_FILE cannot be opened: {why}"


def _filter(subsystems: str) -> Callable[[logging.LogRecord], bool]:
    """Warnings, and lines of the subsystems that are asked for; with ^ in front, of all others."""
    names = _names(subsystems)
    but = subsystems.startswith("^")

    def passes(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING or not names or "ALL" in names:
            return True
        return (record.name.rpartition(".")[2].upper() in names) != but

    return passes


def _names(subsystems: str) -> set[str]:
    return {one.strip().upper() for one in subsystems.removeprefix("^").split(",") if one.strip()}


# ---- what a State says


def say_job(rank: int, name: str, report: dict[str, Any], before: dict[str, Any] | None) -> None:
    """A job that ended well. before: the last report of the same name."""
    if _TUNING.isEnabledFor(logging.INFO) and _choice(report) != _choice(before):
        _TUNING.info('rank %d: "%s": %s', rank, name, _choice(report))
    if _CALLS.isEnabledFor(TRACE):
        _CALLS.log(
            TRACE,
            'rank %d: "%s": %d units here, %d in the union, %d bytes sent, %d received, %.3f ms',
            rank,
            name,
            *(report.get(key, 0) for key in ("units", "union_units", "sent_bytes")),
            report.get("received_bytes", 0),
            report.get("seconds", 0.0) * 1e3,
        )


def _choice(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    if report.get("outcome") == "use_dense":
        return "the group's dense all-reduce"
    width = report.get("width")
    return report["scheme"] + (f", units of {width} elements" if width else "")


def span(what: str) -> AbstractContextManager[Any]:
    """A span `zensync::what` in the traces of torch.profiler, on this thread."""
    from torch.autograd.profiler import record_function

    return record_function(f"zensync::{what}")
