"""The way of every tensor that is not on the CPU: push and pull in plain operations of torch, on
the tensor's own device, over a State's collectives for that device (`_dense.py`). Bits are those
of `balanced`.

Host and device meet only where a size is read: once for the push and once for the pull (`_sizes`,
`_union_sizes`; neither below SMALL_BYTES); for a COO tensor once for its check, once at the end of
a small one (its entries), and twice where it is not coalesced (entries and repeats, then entries of
each repeat). Collective calls of the State's worker, on its side stream: all ranks make the same
ones, with equal name, shape, dtype, layout and op (`_device_sums.py` sees to that).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ._exact import BITS, add, finish, widen, zeros
from ._tensors import CooParts
from .errors import Error

SMALL_BYTES = 64 << 10  # dense bytes below which all slots are sent, and no sizes
_ALIGN = 8  # of the parts of a message, so that they can be viewed in any dtype


class Collectives(Protocol):
    """What it runs on; tensors are flat. counts: of `to` and of `given` by rank; empty: equal."""

    rank: int
    size: int

    def all_to_all(
        self, to: torch.Tensor, given: torch.Tensor, counts: tuple[list[int], list[int]], name: str
    ) -> None: ...

    def all_gather(self, to: torch.Tensor, given: torch.Tensor, name: str) -> None: ...


@dataclass(frozen=True)
class Counts:
    """What all ranks know of a sum: non-zero units of each rank, and of the union."""

    totals: list[int]
    union: int


@dataclass(frozen=True)
class _Layout:
    """Units, owners and slots of one tensor: unit_of[owner, slot], `units` where there is none."""

    name: str
    units: int
    width: int
    unit_of: torch.Tensor
    wire: torch.dtype  # of the values in a push
    result: torch.dtype  # of the values in a pull
    small: bool

    @property
    def slots(self) -> int:
        return self.unit_of.shape[1]

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return self.width * dtype.itemsize


@dataclass(frozen=True)
class _Source:
    """What one rank sends: which units [units], and their values."""

    member: torch.Tensor
    pick: Callable[[torch.Tensor], torch.Tensor]  # units (`units`: any value) -> [k, width]


@dataclass(frozen=True)
class _Part:
    """A message that was read: slots [k] (ascending), whether each counts, values [k, width]."""

    slots: torch.Tensor
    counts: torch.Tensor | None  # None: all do
    values: torch.Tensor


def reduce_dense(
    tensor: torch.Tensor,
    group: Collectives,
    *,
    average: bool = False,
    name: str = "",
    ids: torch.Tensor | None = None,
) -> Counts | None:
    """Sums a dense-stored tensor over `group`, in place. Counts unless it is a small one.

    What is not supported was refused before (`_tensors.require_supported`). name: seeds the
    partition, equal on all ranks. ids: rows [k] outside which all is +0.0: no scan is made.
    Errors are those of the group.
    """
    if tensor.numel() == 0:
        return None
    used = tensor.resolve_neg().contiguous()
    rows = tensor.shape[0] if tensor.dim() > 1 else tensor.numel()
    table = used.view(rows, -1)
    unit_of = rotation(rows, group.size, name, table.device)
    layout = _layout((rows, table.shape[1]), used.dtype, used.dtype, unit_of, name)
    if ids is None:
        member = clear_minuszeros(table)
    else:
        member = torch.zeros(rows, dtype=torch.bool, device=table.device)
        member[ids] = True

    def pick(units: torch.Tensor) -> torch.Tensor:
        values = table[units.clamp(max=rows - 1)]
        if ids is None or not layout.small:
            return values
        return values.masked_fill(~member[units.clamp(max=rows - 1)].unsqueeze(1), 0)

    parts, counts = _push_pull(_Source(member, pick), layout, group, average)
    padded = table
    if layout.small:  # all slots are there: those that do not count go to one more row
        padded = torch.cat([table, table.new_empty((1, layout.width))])
    for owner, part in enumerate(parts):
        units = layout.unit_of[owner, part.slots]
        if part.counts is not None:
            units = torch.where(part.counts, units, rows)
        padded.index_copy_(0, units, part.values)
    if layout.small:
        table.copy_(padded[:-1])
    if used.data_ptr() != tensor.data_ptr() or tensor.is_neg():
        tensor.copy_(used)
    return counts


def reduce_coo(
    parts: CooParts, coalesced: bool, group: Collectives, *, average: bool = False, name: str = ""
) -> tuple[torch.Tensor, Counts | None]:
    """The sum of a COO tensor, coalesced; otherwise as `reduce_dense`. coalesced: whether it is.

    Error: an index is outside the tensor.
    """
    if parts.rows == 0 or parts.row_elems == 0:
        return parts.assemble(parts.indices[:0], parts.values[:0]), None
    require_inside(parts, group.rank, name)
    ids, values = without_repeats(parts, coalesced)
    place = ids.new_full((parts.rows + 1,), len(ids)).scatter_(
        0, ids, torch.arange(len(ids), device=ids.device)
    )
    unit_of = rotation(parts.rows, group.size, name, ids.device)
    shape = (parts.rows, parts.row_elems)
    layout = _layout(shape, values.dtype, parts.values.dtype, unit_of, name)
    padded = torch.cat([values, values.new_zeros((1, parts.row_elems))])
    source = _Source(place[:-1] < len(ids), lambda units: padded[place[units]])
    got, counts = _push_pull(source, layout, group, average)
    units = torch.cat([layout.unit_of[owner, part.slots] for owner, part in enumerate(got)])
    sums = torch.cat([part.values for part in got])
    order = units.argsort()
    if got[0].counts is not None:
        counted = torch.cat([part.counts for part in got if part.counts is not None])
        entries = int(counted.sum())  # meets the host: the entries of a small tensor's result
        # Those that do not count go behind all others.
        order = torch.where(counted, units, layout.units).argsort()[:entries]
    rows = sums[order].view(-1, *parts.shape[parts.sparse_dim :])
    return parts.assemble(units[order], rows), counts


def require_inside(parts: CooParts, rank: int, name: str) -> None:
    """Error, as of the core, if an index is outside the tensor. Meets the host, once."""
    outside = (parts.indices < 0) | (parts.indices >= parts.rows)
    if bool(outside.any()):
        entry = int(outside.int().argmax())
        text = f"row {int(parts.indices[entry])} (entry {entry}) is outside the tensor's "
        raise Error(text + f"{parts.rows} rows", rank=rank, tensor=name, culprit=rank)


def _layout(
    shape: tuple[int, int],
    wire: torch.dtype,
    result: torch.dtype,
    unit_of: torch.Tensor,
    name: str,
) -> _Layout:
    units, width = shape
    is_small = units * width * result.itemsize < SMALL_BYTES
    return _Layout(name, units, width, unit_of, wire, result, is_small)


def rotation(units: int, size: int, name: str, device: torch.device) -> torch.Tensor:
    """The unit at [owner, slot]; `units` in a last, partial group where there is none."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    slots = torch.arange(-(-units // size), device=device)
    mixed = slots + seed
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    turn = ((mixed >> 31) & 0x7FFFFFFF) % size
    owners = torch.arange(size, device=device).unsqueeze(1)
    return (slots * size + (owners - turn) % size).clamp(max=units)


def clear_minuszeros(table: torch.Tensor) -> torch.Tensor:
    """Which rows are non-zero, bool [rows]; every -0.0 in `table` becomes +0.0."""
    bits = table.view(BITS[table.dtype.itemsize])
    if table.is_floating_point():
        bits.masked_fill_(bits == torch.iinfo(bits.dtype).min, 0)
    return (bits != 0).any(1)


def without_repeats(parts: CooParts, coalesced: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending rows and their values [rows, width]; duplicates added as they are stored."""
    values = widen(parts.values.view(-1, parts.row_elems))  # on all ranks, repeats or not
    if coalesced or len(values) < 2:
        return parts.indices, values
    ids, order = parts.indices.sort(stable=True)
    is_first = torch.cat([torch.ones_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])
    group = is_first.cumsum(0) - 1
    at = torch.arange(len(ids), device=ids.device)
    repeat = at - torch.where(is_first, at, 0).cummax(0).values
    # Meets the host: how many rows, how often the most frequent one is there.
    rows, most = torch.stack([group[-1] + 1, repeat.max() + 1]).tolist()
    by_repeat = repeat.argsort(stable=True)
    often = torch.zeros(most, dtype=torch.int64, device=ids.device)
    often.scatter_add_(0, repeat, torch.ones_like(repeat))
    sums = zeros(rows, values)
    start = 0
    for count in often.tolist():  # meets the host: entries of each repeat
        chosen = by_repeat[start : start + count]
        add(sums, group[chosen], values[order[chosen]])
        start += count
    first = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    return first.scatter_(0, group, ids), sums


def _push_pull(
    source: _Source, layout: _Layout, group: Collectives, average: bool
) -> tuple[list[_Part], Counts | None]:
    """The union and its sums, a part for each owner."""
    got, total = _push(source, layout, group)
    known = None
    union = torch.zeros(layout.slots, dtype=torch.bool, device=layout.unit_of.device)
    for part in got:
        if part.counts is None:
            union[part.slots] = True
        else:
            union |= part.counts
    if layout.small:
        counts = [layout.slots] * group.size
        slots = place = torch.arange(layout.slots, device=union.device)
    else:
        counts, totals = _union_sizes(union, total, layout, group)
        known = Counts(totals, sum(counts))
        slots, place = _compact(union, counts[group.rank]), union.cumsum(0) - 1
    sums = zeros(counts[group.rank], got[0].values)
    for part in got:  # in rank order
        add(sums, place[part.slots], part.values)
    sums = finish(sums, layout.result, group.size if average else 1)
    lengths = [_length(count, layout, layout.result) for count in counts]
    message = _pack(union, slots, sums, layout)
    padded = torch.nn.functional.pad(message, (0, max(lengths) - len(message)))
    everything = padded.new_empty(group.size * len(padded))
    group.all_gather(everything, padded, layout.name)
    pieces = everything.view(group.size, -1).unbind()
    parts = [
        _unpack(piece, layout, layout.result, count)
        for piece, count in zip(pieces, counts, strict=True)
    ]
    return parts, known


def _push(source: _Source, layout: _Layout, group: Collectives) -> tuple[list[_Part], int]:
    """Sends each owner its units; what came here, by rank, and how many went out."""
    spread = torch.cat([source.member, source.member.new_zeros(1)])[layout.unit_of]
    if layout.small:
        out = back = [layout.slots] * group.size
        flat = torch.arange(spread.numel(), device=spread.device)
    else:
        out, back = _sizes(spread, layout, group)
        flat = _compact(spread.view(-1), sum(out))
    values = source.pick(layout.unit_of.view(-1)[flat]).split(out)
    slots = (flat % layout.slots).split(out)
    sent = torch.cat([_pack(spread[to], slots[to], values[to], layout) for to in range(group.size)])
    sent_bytes = [_length(count, layout, layout.wire) for count in out]
    received_bytes = [_length(count, layout, layout.wire) for count in back]
    received = sent.new_empty(sum(received_bytes))
    group.all_to_all(received, sent, (received_bytes, sent_bytes), layout.name)
    parts = [
        _unpack(piece, layout, layout.wire, count)
        for piece, count in zip(received.split(received_bytes), back, strict=True)
    ]
    return parts, sum(out)


def _sizes(
    spread: torch.Tensor, layout: _Layout, group: Collectives
) -> tuple[list[int], list[int]]:
    """Units that go to each rank, and that come from each. Meets the host, once."""
    out = spread.sum(1)
    back = torch.empty_like(out)
    group.all_to_all(back, out, ([], []), layout.name)
    to, come = torch.stack([out, back]).tolist()
    return to, come


def _union_sizes(
    union: torch.Tensor, total: int, layout: _Layout, group: Collectives
) -> tuple[list[int], list[int]]:
    """Units of the union at each owner, and non-zero units of each rank. Meets the host, once."""
    mine = torch.stack([union.sum(), torch.full_like(union[0], total, dtype=torch.int64)])
    sizes = mine.new_empty(2 * group.size)
    group.all_gather(sizes, mine, layout.name)
    parts, totals = sizes.view(-1, 2).t().tolist()
    return parts, totals


def _compact(member: torch.Tensor, count: int) -> torch.Tensor:
    """The places [count] where `member` is set, ascending; the host is not met, as `nonzero` does.

    All other places are written to one more, which is dropped.
    """
    at = torch.where(member, member.cumsum(0) - 1, count)
    found = torch.empty(count + 1, dtype=torch.int64, device=member.device)
    return found.scatter_(0, at, torch.arange(len(member), device=member.device))[:count]


# Messages: an index (ids, or a bit for each slot: whichever is smaller), then the values.


def _is_raw(count: int, layout: _Layout) -> bool:
    return not layout.small and count * _id_dtype(layout).itemsize < -(-layout.slots // 8)


def _id_dtype(layout: _Layout) -> torch.dtype:
    return torch.int32 if layout.slots < 2**31 else torch.int64


def _index_bytes(count: int, layout: _Layout) -> int:
    if _is_raw(count, layout):
        return count * _id_dtype(layout).itemsize
    return -(-layout.slots // 8)


def _up(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _length(count: int, layout: _Layout, dtype: torch.dtype) -> int:
    if count == 0:
        return 0
    return _up(_index_bytes(count, layout)) + _up(count * layout.slot_bytes(dtype))


def _pack(
    member: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, layout: _Layout
) -> torch.Tensor:
    """The message, uint8, for `slots`; `member` [slots of the owner] says which of them count."""
    if len(slots) == 0:
        return torch.empty(0, dtype=torch.uint8, device=slots.device)
    if _is_raw(len(slots), layout):
        index = slots.to(_id_dtype(layout)).view(torch.uint8)
    else:
        bits = torch.nn.functional.pad(member.to(torch.uint8), (0, -layout.slots % 8)).view(-1, 8)
        index = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
            1, dtype=torch.uint8
        )
    pieces = [index, values.contiguous().view(-1).view(torch.uint8)]
    return torch.cat(
        [torch.nn.functional.pad(piece, (0, -len(piece) % _ALIGN)) for piece in pieces]
    )


def _unpack(message: torch.Tensor, layout: _Layout, dtype: torch.dtype, count: int) -> _Part:
    """Reads a message of `count` units; what is behind it is padding."""
    if count == 0:
        none = torch.empty((0, layout.width), dtype=dtype, device=message.device)
        return _Part(torch.empty(0, dtype=torch.int64, device=message.device), None, none)
    index_bytes = _index_bytes(count, layout)
    start = _up(index_bytes)
    values = message[start : start + count * layout.slot_bytes(dtype)].view(dtype)
    values = values.view(count, layout.width)
    index = message[:index_bytes]
    if _is_raw(count, layout):
        return _Part(index.view(_id_dtype(layout)).long(), None, values)
    shifts = torch.arange(8, dtype=torch.uint8, device=message.device)
    counts = ((index.unsqueeze(1) >> shifts) & 1).view(-1)[: layout.slots].bool()
    if layout.small:
        return _Part(torch.arange(layout.slots, device=message.device), counts, values)
    return _Part(_compact(counts, count), None, values)
