"""`zensync.observe`, a dry run: what a module's gradients hold, and what zensync would change.

Hooks read local gradients and change nothing; ranks wait for nobody until the report is asked for.
Each rank lays what it saw into the group's store, when it has seen all steps, is closed, or ends.
What goes wrong there ends the observation, with a warning, and not the training.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _torch_compat
from ._arguments import host_names, require_group
from ._attach import is_attached
from ._bucket import SMALL_BYTES
from ._exact import BITS
from ._forecast import forecast, now_flow
from ._names import ParameterNames, embeddings_and_others
from ._notice_board import NoticeBoard, time_link
from ._observed import COO, DENSE, Diary, Record, Subject, link_ms, records_of, totals, verdict
from ._tensors import DTYPES, spec_of
from .bench.options import parse_rate
from .errors import Error, UnsupportedError

Named = list[tuple[str, torch.nn.Parameter]]

DIARY_BYTES = 64 << 20  # of bitmaps on one rank; with larger tables not every step is looked at
_CAP_BYTES = 25 << 20  # of a DDP's buckets, where it does not say
_PIECE_BYTES = 16 << 20  # of a gradient that is looked at at once
_live: weakref.WeakSet[Observation] = weakref.WeakSet()
_logger = logging.getLogger("zensync")


def observe(
    model: torch.nn.Module,
    steps: int = 20,
    *,
    group: dist.ProcessGroup | None = None,
    rate: str | None = None,
    hosts: Sequence[str | int] | None = None,
) -> Observation:
    """Records what the gradients of `model` hold in its next `steps` backward passes.

    A collective call if torch.distributed is initialised. Nothing is changed: gradients, losses and
    what is sent for them are those without it. Call it before `attach`.

    model: a plain module, or a DDP (`group` is its own; passes under `no_sync()` count with the one
    that ends them). rate: of each host's link, "200mbit" or "1gbit"; None: timed now, in the
    group's own all-reduce. hosts: one entry per rank, equal for ranks that share a network card;
    None: each has its own.
    Errors: Error for arguments; UnsupportedError for parameters without plain memory;
    MismatchError if arguments or parameters differ between ranks.
    """
    if not isinstance(model, torch.nn.Module):
        raise Error(f"a torch.nn.Module is needed, not {type(model).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise Error(f"steps= must be a whole number above 0, not {steps!r}")
    try:
        bits = None if rate is None else parse_rate(rate)
    except (ValueError, AttributeError) as why:
        raise Error(f"rate={rate!r} is not a rate such as 200mbit or 1gbit") from why
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None:
        if group is not None and group is not ddp.process_group:
            raise Error("group= is for a plain module; a DDP has its own")
        group, model = ddp.process_group, ddp.module
    if is_attached(model):
        raise Error("a State is attached to this module already: observe() it without")
    named = list(model.named_parameters())
    if not any(one.requires_grad for _, one in named):
        raise UnsupportedError("the module has no parameter that requires a gradient")
    subjects = _subjects(model, named)
    alone = group is None and not (dist.is_available() and dist.is_initialized())
    used = None if alone else require_group(group)
    size = 1 if used is None else dist.get_world_size(used)
    names = host_names(hosts, size) or [f"host {rank}" for rank in range(size)]
    board = NoticeBoard(used)
    board.require_equal(f"{steps} {bits} {names} {ddp is None} {subjects}")
    if bits is None and used is not None and size > 1:
        bits = time_link(used, named[0][1].device)
    return Observation(named, subjects, board, (steps, bits, names), ddp)


def _subjects(model: torch.nn.Module, named: Named) -> list[Subject]:
    tables, others = embeddings_and_others(model)
    names = ParameterNames(model)
    found = []
    for name, one in named:
        if torch.nn.parameter.is_lazy(one):
            raise UnsupportedError(f"{name} is lazy and has no values yet; run the module once")
        if one.is_meta or _torch_compat.has_own_dispatch(one):
            raise UnsupportedError(f"{name} ({type(one).__name__}) holds no plain memory")
        spec = spec_of(one, torch.float32)
        found.append(
            Subject(
                name=name,
                shape=tuple(one.shape),
                dtype=str(one.dtype).removeprefix("torch."),
                rows=spec.rows,
                row_elems=spec.row_elems,
                item_bytes=one.element_size(),
                starts_sparse=names.starts_sparse(one),
                is_tied=id(one) in tables & others,
                is_frozen=not one.requires_grad,
                refusal=_refusal(one),
            )
        )
    return found


def _refusal(parameter: torch.Tensor) -> str:
    if parameter.numel() * parameter.element_size() < SMALL_BYTES:
        return "small"
    if parameter.dtype not in DTYPES:
        return "of a dtype that is not summed sparse"
    return "" if parameter.is_contiguous() else "not contiguous"


def find_rows(gradient: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
    """(bool [rows]: which have a bit set besides signs, how many elements have).

    Of a COO gradient: which rows it has; its elements are not counted.
    """
    found = torch.zeros(rows, dtype=torch.bool)
    if gradient.layout == torch.sparse_coo:
        found[_torch_compat.coo_indices(gradient)[0].cpu()] = True
        return found, 0
    if gradient.numel() == 0:
        return found, 0
    plain = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    whole = plain.detach().resolve_neg().reshape(rows, -1)
    step = max(_PIECE_BYTES // (whole.shape[1] * whole.element_size()), 1)
    elements = 0
    for begin in range(0, rows, step):
        piece = whole[begin : begin + step].contiguous()
        is_set = (piece.view(BITS[piece.element_size()]) << 1).ne(0)
        found[begin : begin + step] = is_set.any(dim=1).cpu()
        elements += int(is_set.sum())
    return found, elements


class Observation:
    """What was seen in the backward passes so far. `observe` makes it; it keeps no model alive."""

    def __init__(
        self,
        named: Named,
        subjects: Sequence[Subject],
        board: NoticeBoard,
        asked: tuple[int, float | None, list[str]],
        ddp: DistributedDataParallel | None,
    ) -> None:
        self.rank, self.size = board.rank, board.size
        self.steps = 0  # backward passes that ended, those that accumulate not counted
        self.error: str | None = None  # why it ended early
        self._asked, self._rate, self._hosts = asked
        self._subjects, self._board = subjects, board
        self._ddp = None if ddp is None else weakref.ref(ddp)
        cap = getattr(ddp, "bucket_bytes_cap", _CAP_BYTES)
        self._cap_bytes = None if ddp is None else int(cap)
        self._diary = Diary(subjects)
        bitmaps = max(sum(subject.bitmap_bytes for subject in subjects), 1)
        most = max(DIARY_BYTES // bitmaps, 1)
        self._stride = -(-self._asked // most)
        self._seen: dict[int, tuple[int, int, Any]] = {}  # in this backward
        self._held: dict[int, tuple[int, int, Any]] = {}  # in those that accumulate before it
        self._backward = -1
        self._is_told = False
        self._report: dict[str, Any] | None = None
        own = weakref.ref(self)
        self._handles = [
            one.register_post_accumulate_grad_hook(_hook(own, place))
            for place, (_, one) in enumerate(named)
            if one.requires_grad
        ]
        _live.add(self)

    @property
    def is_done(self) -> bool:
        """Whether it records no more."""
        return not self._handles

    def _saw(self, place: int, gradient: torch.Tensor | None) -> None:
        """In a backward: what one parameter's local gradient holds, before it is sent."""
        if self.is_done or gradient is None:
            return
        try:
            if (now := _torch_compat.backward_id()) != self._backward:
                self._backward = now
                self._seen.clear()  # of one that was broken off
                _torch_compat.at_backward_end(self._end)
            if self.steps % self._stride:
                return
            is_coo = gradient.layout == torch.sparse_coo
            rows, elements = find_rows(gradient, self._subjects[place].rows)
            bitmap = np.packbits(rows.numpy())
            self._seen[place] = (COO if is_coo else DENSE, elements, bitmap)
        except Exception as why:
            self._give_up(why)

    def _end(self) -> None:
        """A backward has ended well. Nothing here waits for another rank."""
        if self.is_done:
            return
        self._held.update(self._seen)  # gradients add up: the later ones hold the earlier
        self._seen = {}
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None and not ddp.require_backward_grad_sync:
            return
        try:
            if self.steps % self._stride == 0:
                self._diary.write(self._held)
        except Exception as why:
            self._give_up(why)
            return
        self._held = {}
        self.steps += 1
        if self.steps >= self._asked:
            self.close()

    def _give_up(self, why: Exception) -> None:
        self.error = f"{type(why).__name__}: {why}"
        _logger.warning("zensync: observe ends after %d steps: %s", self.steps, self.error)
        self.close()

    def close(self) -> None:
        """Removes the hooks and tells other ranks what was seen. Waits for nobody; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._is_told:
            return
        self._is_told = True
        try:
            self._board.put(self._diary.pack())
        except Exception as why:  # the store may be gone
            self.error = self.error or f"{type(why).__name__}: {why}"
            _logger.debug("zensync: an observation could not be told: %s", why)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_report"):
            self.close()

    def report(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """All figures, equal on all ranks but for "error", as plain data. Ends the observation.

        May be called on one rank alone. Waits until the other ranks have seen as many steps, have
        closed theirs, or have ended; where one has not after `timeout_s`, "error" says so, and
        there are no figures.
        """
        self.close()
        if self._report is None:
            try:
                packed = self._board.take(timeout_s)
                diaries = [
                    self._diary if one is None else self._diary.unpack(one) for one in packed
                ]
                records = records_of(self._subjects, diaries)
                self._report = self._make_report(records, self.error)
            except (RuntimeError, ValueError) as why:
                return self._make_report([], self.error or str(why))
        return self._report

    def _make_report(self, records: Sequence[Record], error: str | None) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        moved, figures = (0.0, 0.0), {"exchange_bytes": 0.0, "dense_bytes": 0.0}
        if records and records[0].steps:
            plan = forecast(records, self._cap_bytes)
            now = [now_flow(record) for record in records]
            for place, record in enumerate(records):
                scheme, flow = plan.by_place[place]
                rows.append(self._row(record, plan.ways[place], now[place], flow) | {
                    "scheme": scheme
                })  # fmt: skip
            whole = plan.whole
            moved = sum(now[1:], now[0]).card(self._hosts), whole.card(self._hosts)
            figures = {"exchange_bytes": whole.exchanged, "dense_bytes": whole.handed}
        return {
            "ranks": self.size, "steps": records[0].steps if records else 0,
            "every": self._stride, "rate_bits_per_s": self._rate, "error": error,
            **totals(rows, moved, self._rate), **figures, "parameters": rows,
        }  # fmt: skip

    def _row(self, record: Record, way: str, now: Any, after: Any) -> dict[str, Any]:
        """The figures of one parameter."""
        subject = record.subject
        now_bytes, zensync_bytes = now.card(self._hosts), after.card(self._hosts)
        return {
            "name": subject.name,
            "shape": list(subject.shape),
            "dtype": subject.dtype,
            "layout": ("none", "dense", "coo")[record.layout],
            "density": record.average("density"),
            "element_density": record.average("element_density"),
            "union_density": record.average("union_density"),
            "densification": record.average("densification", "active") or None,
            "skewness": record.average("skewness", "active") or None,
            "now_bytes": now_bytes,
            "zensync_bytes": zensync_bytes,
            "now_ms": link_ms(now_bytes, self._rate),
            "zensync_ms": link_ms(zensync_bytes, self._rate),
            "verdict": verdict(record, way, now_bytes, zensync_bytes),
        }

    def table(self) -> Any:
        """A table for `rich`."""
        from ._observe_text import make_table

        return make_table(self.report())

    def __str__(self) -> str:
        from ._observe_text import as_text

        return as_text(self.report())


def _hook(own: weakref.ref[Observation], place: int) -> Callable[[torch.Tensor], None]:
    """Runs before DDP sends the gradient. A parameter must not keep the observation alive."""

    @_torch_compat.hidden_from_compiler
    def look(parameter: torch.Tensor) -> None:
        if (found := own()) is not None:
            found._saw(place, parameter.grad)

    return look


def _close_all() -> None:
    """At the end of a process: other ranks may wait for what this one saw."""
    for one in list(_live):
        one.close()


atexit.register(_close_all)
