"""`State(check_every=k)`: every k-th sum of each name is compared with the dense one.

The input is copied when the call is made; the dense sum is made by the State's dense group, on the
worker, in blocks, so that memory is that copy and a few blocks. In fp64 (integers: exactly), and
two results may differ by what rounding does: n · eps · Σ|x| of the dtype that sums are made in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ._dense import MAX, DenseGroup
from ._tensors import HALVES, CooParts
from .errors import MismatchError

if TYPE_CHECKING:
    from .state import State

BLOCK_ELEMS = 1 << 21
_logger = logging.getLogger("zensync.coll")

Block = Callable[[int, int], torch.Tensor]  # rows [begin, end) of a tensor, dense-stored


class SumChecks:
    """Which sums are due; equal on all ranks, whose calls are the same."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._made: dict[str, int] = {}

    def dense(self, name: str, tensor: torch.Tensor, average: bool) -> SumCheck | None:
        """For a tensor that is about to be summed in place; None: not due."""
        if not self._is_due(name):
            return None
        rows = tensor.shape[0] if tensor.dim() > 1 else tensor.numel()
        row_elems = tensor.numel() // rows if rows else 1
        whole = tensor.detach()
        before = whole.resolve_neg().clone(memory_format=torch.contiguous_format)
        shape = _Shape(rows, row_elems, tensor.dtype, average)

        def after(_: Any) -> Block:
            return _rows(whole.resolve_neg().reshape(rows, row_elems))

        return SumCheck(name, shape, _rows(before.view(rows, row_elems)), after)

    def coo(self, name: str, parts: CooParts, average: bool) -> SumCheck | None:
        """For the parts of a COO tensor; `compare` gets the result."""
        if not self._is_due(name):
            return None
        shape = _Shape(parts.rows, parts.row_elems, parts.values.dtype, average)
        before = _entries(parts.indices.clone(), parts.values.clone(), parts.row_elems)

        def after(result: Any) -> Block:
            found = CooParts.of(result)
            return _entries(found.indices, found.values, parts.row_elems)

        return SumCheck(name, shape, before, after)

    def shard(
        self, name: str, whole: torch.Tensor, own: torch.Tensor, how: tuple[Part, bool]
    ) -> SumCheck | None:
        """For a reduce-scatter of `whole`; `own` gets this rank's part of the sum.

        how: which part, and whether it is averaged.
        """
        if not self._is_due(name):
            return None
        rows = whole.shape[0]
        row_elems = whole.numel() // rows if rows else 1
        part, average = how
        before = whole.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        shape = _Shape(rows, row_elems, whole.dtype, average)

        def after(_: Any) -> Block:
            got = own.detach().resolve_neg().reshape(len(own), -1)
            return lambda begin, end: got[max(begin - part.rows.start, 0) : end - part.rows.start]

        return SumCheck(name, shape, _rows(before.view(rows, row_elems)), after, part)

    def _is_due(self, name: str) -> bool:
        if self._every == 0:
            return False
        made = self._made[name] = self._made.get(name, 0) + 1
        return made % self._every == 0


@dataclass(frozen=True)
class Part:
    """A rank's part of the sum: rows [start, stop) and columns of [rows, row_elems]."""

    rows: range
    columns: slice


@dataclass(frozen=True)
class _Shape:
    rows: int
    row_elems: int
    dtype: torch.dtype
    average: bool


@dataclass(frozen=True)
class SumCheck:
    """One sum that is due: its input, and how to read its result."""

    name: str
    shape: _Shape
    before: Block
    after: Callable[[Any], Block]
    part: Part | None = None  # what this rank has of the result; None: all of it

    def compare(self, state: State, result: Any = None) -> None:
        """On the worker, once the sum is there. MismatchError, on all ranks alike."""
        after = self.after(result)
        group = state.groups.of(self.before(0, 0).device)
        step = max(BLOCK_ELEMS // max(self.shape.row_elems, 1), 1)
        found = torch.zeros(2 * state.size, dtype=torch.int64)  # how many, first row + 1, by rank
        for begin in range(0, self.shape.rows, step):
            end = min(begin + step, self.shape.rows)
            sums = self._sums(group, self.before(begin, end))
            first = begin
            if self.part is not None:
                first = max(begin, self.part.rows.start)
                inside = slice(first - begin, max(min(end, self.part.rows.stop), first) - begin)
                sums = [one[inside, self.part.columns] for one in sums]
                if inside.start >= inside.stop:
                    continue
            wrong = self._wrong(sums, after(begin, end), group.size)
            rows = wrong.any(1).nonzero().view(-1)
            if len(rows) and found[state.rank] == 0:
                found[state.size + state.rank] = first + int(rows[0]) + 1
            found[state.rank] += int(wrong.sum())
        state.dense.all_reduce(found, MAX, self.name)
        if found.any():
            raise self._error(*(part.tolist() for part in found.split(state.size)))

    def _sums(self, group: DenseGroup, before: torch.Tensor) -> list[torch.Tensor]:
        """Dense sums over all ranks: of the elements, and of what they are without signs."""
        if not before.dtype.is_floating_point:
            sums = [before.to(torch.int64, copy=True)]
        else:
            sums = [before.to(torch.float64, copy=True), before.double().abs()]
        for one in sums:
            group.all_reduce(one, name=self.name)
        return sums

    def _wrong(self, sums: list[torch.Tensor], got: torch.Tensor, ranks: int) -> torch.Tensor:
        """bool [rows, row_elems]: which elements of the result are not the sum."""
        if not got.dtype.is_floating_point:
            return got.to(self.shape.dtype) != sums[0].to(self.shape.dtype)  # both wrap around
        divisor = ranks if self.shape.average else 1
        total, size, result = sums[0] / divisor, sums[1] / divisor, got.double()
        own = torch.finfo(self.shape.dtype)
        added = torch.finfo(torch.float32) if self.shape.dtype in HALVES else own
        # Twice: the fp64 sum is rounded too. A subnormal result is off by one of its steps.
        allowed = 2 * (ranks + 1) * added.eps * size + own.eps * total.abs() + own.tiny
        is_same = (result == total) | (result.isnan() & total.isnan())
        overflows = (size * divisor > added.max) | (total.abs() > own.max)  # on the way, or at last
        is_right = is_same | ((result - total).abs() <= allowed)
        return ~(is_right | (overflows & ~result.isfinite()))

    def _error(self, counts: list[int], rows: list[int]) -> MismatchError:
        wrong = [rank for rank, count in enumerate(counts) if count]
        words = "; ".join(
            f"rank {rank} has {counts[rank]} wrong elements, the first in row {rows[rank] - 1}"
            for rank in wrong
        )
        alike = len(counts) > 1 and len(wrong) == len(counts) and len({*counts}) == 1
        hint = ": the same on all ranks, so its owner added wrongly" if alike else ""
        culprit = None if alike else wrong[0]
        text = f'"{self.name}" is not the dense sum (check_every): {words}{hint}'
        return MismatchError(text, tensor=self.name, culprit=culprit)


def _rows(table: torch.Tensor) -> Block:
    return lambda begin, end: table[begin:end]


def _entries(indices: torch.Tensor, values: torch.Tensor, row_elems: int) -> Block:
    """Rows of a COO tensor, duplicates added up."""
    flat = values.detach().reshape(len(indices), row_elems)
    wide = torch.float64 if flat.is_floating_point() else torch.int64

    def block(begin: int, end: int) -> torch.Tensor:
        inside = ((indices >= begin) & (indices < end)).nonzero().view(-1)
        result = torch.zeros((end - begin, row_elems), dtype=wide, device=flat.device)
        return result.index_add_(0, indices[inside] - begin, flat[inside].to(wide))

    return block
