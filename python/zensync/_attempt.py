"""One attempt of all ranks of a group to make a State: its number, who has come, why it failed.

Every rank counts its attempts in the group's store, and the n-th of one rank meets the n-th of
each other. A rank whose attempt fails leaves a note, which ends that of its peers within seconds,
with its words. Ranks that had not come by then are named in the note; when they come, they go on
to the next number: so a State made on some ranks only does not put ranks out of step for ever.
Nothing here waits inside the store, because a client of a TCPStore serves one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from . import _core
from .errors import DeadlineError, Error, PeerLostError, make_error

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_ROLL_CALL_S = 6.0  # for whoever lives to answer


def poll(
    store: dist.Store, key: str, timeout_s: float, check: Callable[[], None] | None = None
) -> bool:
    """Whether `key` came within `timeout_s`. `check` is called now and then, and may raise."""
    until = time.monotonic() + timeout_s
    pause = _FIRST_PAUSE_S
    while not store.check([key]):
        if check is not None:
            check()
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)
    return True


class PeerFailed(Exception):  # noqa: N818
    """The attempt was ended by a note; `error` says so in words."""

    def __init__(self, error: Error) -> None:
        super().__init__(str(error))
        self.error = error


class UnreachableError(Exception):
    """Ranks cannot be connected in the way that was tried; `error` says so in words."""

    def __init__(self, error: Error) -> None:
        super().__init__(str(error))
        self.error = error


class Attempt:
    """The next attempt of this rank. `prefix`: for keys that no other attempt has."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.prefix = self._next()
        while self.is_missing():
            self.prefix = self._next()
        store.set(f"{self.prefix}/here/{rank}", "1")

    def _next(self) -> str:
        return f"zensync/{self._store.add(f'zensync/made/{self._rank}', 1)}"

    def is_missing(self) -> bool:
        """Whether this attempt failed because (also) this rank had not come."""
        return self._rank in (self._note() or {}).get("missing", ())

    def is_unreachable(self) -> bool:
        """Whether this attempt failed because ranks could not connect to each other."""
        return bool((self._note() or {}).get("unreachable"))

    def why(self) -> str:
        """What the note says; empty if there is none."""
        return str((self._note() or {}).get("message", ""))

    def check(self) -> None:
        """PeerFailed if some rank has left a note."""
        note = self._note()
        if note is None:
            return
        text = f"rank {note['rank']} could not make its State: {note['message']}"
        info = _core.ErrorInfo(note["kind"], text)
        info.rank, info.culprit = self._rank, note["culprit"]
        raise PeerFailed(make_error(info))

    def meet(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Waits until all ranks have come here. DeadlineError, and what `check` raises."""
        key = f"{self.prefix}/all"
        if self._store.add(f"{self.prefix}/come", 1) == self._size:
            self._store.set(key, "1")
        if not poll(self._store, key, timeout_s, check):
            raise DeadlineError(
                f"not all ranks had their connections within {timeout_s:.3g} s", rank=self._rank
            )

    def call_roll(self) -> None:
        """Once ranks could not be connected: whether all still live. PeerLostError, the same on all
        that do, names one that does not answer.

        Everybody comes here who lives: the note has ended what they waited in.
        """
        self._store.set(f"{self.prefix}/alive/{self._rank}", "1")
        until = time.monotonic() + _ROLL_CALL_S
        for rank in range(self._size):
            left_s = until - time.monotonic()
            if not poll(self._store, f"{self.prefix}/alive/{rank}", left_s, self._check_gone):
                self._store.compare_set(f"{self.prefix}/gone", "", str(rank))
        self._check_gone()

    def _check_gone(self) -> None:
        key = f"{self.prefix}/gone"
        if not self._store.check([key]):
            return
        gone = int(self._store.get(key))
        raise PeerLostError(
            f"rank {gone} is gone: it came, but could not be connected to, and does not answer "
            "through the process group's store",
            rank=self._rank,
            culprit=gone,
        )

    def first_error(self, own: Error) -> Error:
        """What all ranks call the failure: the words of the note, or this rank's own."""
        try:
            self.check()
        except PeerFailed as first:
            return first.error
        except RuntimeError:  # of the store
            pass
        return own

    def fail(self, why: BaseException) -> None:
        """Leaves a note for the others, unless there is one. Raises nothing of the store's."""
        unreachable = isinstance(why, UnreachableError)
        if isinstance(why, UnreachableError):
            why = why.error
        error = why if isinstance(why, Error) else None
        note = {
            "rank": self._rank,
            "kind": error.kind if error else "internal",
            "message": error.message if error else f"{type(why).__name__}: {why}".rstrip(": "),
            "culprit": self._rank if error is None or error.culprit is None else error.culprit,
            "missing": [],
            "unreachable": unreachable,
        }
        with contextlib.suppress(RuntimeError):
            if isinstance(why, DeadlineError) or not isinstance(why, Exception):
                note["missing"] = [
                    other
                    for other in range(self._size)
                    if not self._store.check([f"{self.prefix}/here/{other}"])
                ]
            self._store.compare_set(f"{self.prefix}/failed", "", json.dumps(note))

    def _note(self) -> dict[str, Any] | None:
        key = f"{self.prefix}/failed"
        if not self._store.check([key]):
            return None
        note: dict[str, Any] = json.loads(self._store.get(key))
        return note
