"""Uneven numbers of backward passes: a State that `attach` returned is a Joinable of torch.

`with torch.distributed.algorithms.join.Join([state]):` a rank that has left the block takes part
in the backward passes of the others, with nothing of its own; at the end all get the parameters of
a rank that left last. Behind a DDP, `Join([ddp, state])`: the DDP tells who is still there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from . import _torch_compat
from .errors import Error, UnsupportedError

if TYPE_CHECKING:
    from ._backward import Attachment

_MUST_BE_FIRST = (
    "the State of a plain module must be the first in Join([...]), and only one of them; that of a "
    'module attached with parameters="tables" comes behind its DistributedDataParallel: '
    "Join([ddp, state])"
)
_DDP_BEFORE = "put the DistributedDataParallel before the State: Join([ddp, state])"
_DISABLED = "Join of a DistributedDataParallel and a State is not possible with ZENSYNC_DISABLE=1"


class JoinableState(Joinable):
    """The part of a State that Join uses; abstract only in name, State is made of it."""

    group: dist.ProcessGroup
    _attached: Callable[[], Attachment | None] | None = None  # weakly

    def __init__(self) -> None:
        super().__init__()

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """What torch keeps here is there before `__init__`, which may fail."""
        made = super().__new__(cls)
        Joinable.__init__(made)
        return made

    def set_attached(self, attached: Callable[[], Attachment | None]) -> None:
        """Whose backward passes they are; for `attach`."""
        self._attached = attached

    def join_hook(self, **options: Any) -> JoinHook:
        """Called by Join. divide_by_initial_world_size=False: averages are over the ranks that
        have not left the block; else over all, as without it."""
        attachment = self._attached() if self._attached is not None else None
        if attachment is None:
            raise Error("Join is for a State that zensync.attach returned for a plain module")
        attachment.joining.divides_by_all = options.get("divide_by_initial_world_size", True)
        return _Hook(attachment)

    @property
    def join_device(self) -> torch.device:
        """Where torch counts the ranks that have not left, over the group's own backends."""
        known = _torch_compat.device_types(self.group)
        kind = "cpu" if "cpu" in known or not known else next(iter(known))
        return torch.device(kind) if kind == "cpu" else torch.empty(0, device=kind).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group that counts them."""
        return self.group


class _Hook(JoinHook):
    """What a rank does that has left the block."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def main_hook(self) -> None:
        """Once for every backward of the others (behind a DDP: for every forward of it)."""
        joining = self._attachment.joining
        if joining.place() == "later" and not joining.hears_of_a_backward():
            return
        self._attachment.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have left."""
        attachment = self._attachment
        last = attachment.largest(
            "who left Join last", attachment.state.rank if is_last_joiner else -1
        )
        attachment.take_from(last)
        attachment.joining.end()


class Joining:
    """What an Attachment knows of the Join around it."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._work: Any = None  # of the word to the ranks that have left
        self._told: Any = None  # what the forward of a DDP told them
        self._is_behind_ddp = False
        self.divides_by_all = True

    def place(self) -> str:
        """ "none", "first", or "later"; the first tells the others."""
        return _torch_compat.place_in_join(self._attachment.state)

    def at_forward(self, will_synchronise: bool) -> None:
        """At the module's forward: behind a DDP its joined ranks must learn what will come."""
        place = self.place()
        if place == "none" or not _torch_compat.is_in_ddp():
            return
        if place == "first":
            raise UnsupportedError(_DDP_BEFORE)
        if self._attachment.state.disabled:
            raise UnsupportedError(_DISABLED)
        self._is_behind_ddp = True
        self._told = self._attachment.start_largest(_FOLLOWS, int(will_synchronise))

    def at_backward(self) -> None:
        """Before a backward that synchronises. RuntimeError of Join, where it is told to throw."""
        place = self.place()
        if place == "first":
            self._work = Join.notify_join_context(self._attachment.state)
        elif place == "later" and not self._is_behind_ddp:
            raise UnsupportedError(_MUST_BE_FIRST)

    def hears_of_a_backward(self) -> bool:
        """On a rank that has left: whether a backward of the others follows this forward."""
        return self._attachment.largest(_FOLLOWS, 0) == 1

    def wait(self) -> None:
        """At the end of a backward: the words are out."""
        if self._work is not None:
            self._work.wait()
        if self._told is not None:
            self._told.wait()
        self._work = self._told = None

    def flags(self, is_here: bool) -> list[int]:
        """One entry a rank, for a vote in which the largest entries win: who has not left."""
        state = self._attachment.state
        if self.divides_by_all or self.place() == "none":
            return []
        return [int(is_here and rank == state.rank) for rank in range(state.size)]

    def end(self) -> None:
        """The block is over."""
        _torch_compat.leave_join(self._attachment.state)
        self._is_behind_ddp, self.divides_by_all = False, True


_FOLLOWS = "whether a backward follows"
