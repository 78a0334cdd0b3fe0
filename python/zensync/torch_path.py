"""The way of every tensor that is not on the CPU: push and pull in plain operations of torch, on
the tensor's own device, over the collectives of a process group. Bits are those of `balanced`.

Host and device meet only where a size is read: once for the push and once for the pull (`_sizes`,
`_union_sizes`; neither below SMALL_BYTES), once at the end of a small COO tensor (its entries), and
twice for a COO tensor that is not coalesced (entries and repeats, then entries of each repeat).
Collective calls: all ranks make the same ones, with equal name, shape, dtype, layout and op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ._tensors import HALVES, CooParts

SMALL_BYTES = 64 << 10  # dense bytes below which all slots are sent, and no sizes
_ALIGN = 8  # of the parts of a message, so that they can be viewed in any dtype
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
# What x86 makes of Inf - Inf; other processors give other NaNs.
_NO_NUMBER = {torch.float32: -(1 << 22), torch.float64: -(1 << 51)}

# Newer versions of torch have another name for it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class _Group:
    handle: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class _Layout:
    """Units, owners and slots of one tensor: unit_of[owner, slot], `units` where there is none."""

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


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, average: bool = False, name: str = ""
) -> None:
    """Sums `tensor`, dense-stored or COO, over `group`, in place; a COO one comes back coalesced.

    What is not supported was refused before (`_tensors.require_supported`). name: seeds the
    partition, equal on all ranks. On the calling thread; errors are those of the group.
    """
    ranks = _Group(group, dist.get_rank(group), dist.get_world_size(group))
    mode = torch.inference_mode() if tensor.is_inference() else torch.no_grad()
    with mode:
        if tensor.layout == torch.sparse_coo:
            tensor.copy_(_reduce_coo(tensor, ranks, average, name))
        else:
            _reduce_dense(tensor.detach(), ranks, average, name)


def _reduce_dense(tensor: torch.Tensor, group: _Group, average: bool, name: str) -> None:
    if tensor.numel() == 0:
        return
    used = tensor.resolve_neg().contiguous()
    rows = tensor.shape[0] if tensor.dim() > 1 else tensor.numel()
    table = used.view(rows, -1)
    unit_of = rotation(rows, group.size, name, table.device)
    layout = _layout((rows, table.shape[1]), used.dtype, used.dtype, unit_of)
    source = _Source(
        clear_minus_zeros(table), lambda units: table[units.clamp(max=layout.units - 1)]
    )
    for owner, part in enumerate(_push_pull(source, layout, group, average)):
        units = layout.unit_of[owner, part.slots]
        if part.counts is None:
            table.index_copy_(0, units, part.values)
            continue
        # Small: all slots are there, those that do not count hold +0.0, as does this tensor.
        padded = table.new_empty((layout.units + 1, layout.width))
        padded[:-1] = table
        table.copy_(padded.index_copy_(0, units, part.values)[:-1])
    if used.data_ptr() != tensor.data_ptr() or tensor.is_neg():
        tensor.copy_(used)


def _reduce_coo(tensor: torch.Tensor, group: _Group, average: bool, name: str) -> torch.Tensor:
    parts = CooParts.of(tensor)
    if parts.rows == 0 or parts.row_elems == 0:
        return parts.assemble(parts.indices[:0], parts.values[:0])
    ids, values = _without_repeats(parts, tensor.is_coalesced())
    spread = torch.zeros(parts.rows, dtype=torch.bool, device=ids.device)
    spread[ids] = True
    place = spread.cumsum(0) - 1
    unit_of = rotation(parts.rows, group.size, name, ids.device)
    layout = _layout((parts.rows, parts.row_elems), values.dtype, tensor.dtype, unit_of)
    padded = torch.cat([values, values.new_zeros((1, parts.row_elems))])

    def pick(units: torch.Tensor) -> torch.Tensor:
        at = place[units.clamp(max=layout.units - 1)]
        member = spread[units.clamp(max=layout.units - 1)] & (units < layout.units)
        return padded[torch.where(member, at, len(values))]

    got = _push_pull(_Source(spread, pick), layout, group, average)
    units = torch.cat([layout.unit_of[owner, part.slots] for owner, part in enumerate(got)])
    sums = torch.cat([part.values for part in got])
    order = units.argsort()
    if got[0].counts is not None:
        counted = torch.cat([part.counts for part in got if part.counts is not None])
        entries = int(counted.sum())  # meets the host: the entries of a small tensor's result
        # Those that do not count go behind all others.
        order = torch.where(counted, units, layout.units).argsort()[:entries]
    return parts.assemble(units[order], sums[order].view(-1, *parts.shape[parts.sparse_dim :]))


def _layout(
    shape: tuple[int, int], wire: torch.dtype, result: torch.dtype, unit_of: torch.Tensor
) -> _Layout:
    units, width = shape
    return _Layout(
        units, width, unit_of, wire, result, units * width * result.itemsize < SMALL_BYTES
    )


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


def clear_minus_zeros(table: torch.Tensor) -> torch.Tensor:
    """Which rows are non-zero, bool [rows]; every -0.0 in `table` becomes +0.0."""
    bits = table.view(_BITS[table.dtype.itemsize])
    if table.is_floating_point():
        bits.masked_fill_(bits == torch.iinfo(bits.dtype).min, 0)
    return (bits != 0).any(1)


def _without_repeats(parts: CooParts, coalesced: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending rows and their values [rows, width]; duplicates added as they are stored."""
    values = _widen(parts.values.view(-1, parts.row_elems))  # on all ranks, repeats or not
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
    sums = _zeros(rows, values)
    start = 0
    for count in often.tolist():  # meets the host: entries of each repeat
        chosen = by_repeat[start : start + count]
        _add(sums, group[chosen], values[order[chosen]])
        start += count
    first = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    return first.scatter_(0, group, ids), sums


def _zeros(rows: int, like: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if like.dtype in HALVES else like.dtype
    return torch.zeros((rows, like.shape[1]), dtype=dtype, device=like.device)


def _push_pull(source: _Source, layout: _Layout, group: _Group, average: bool) -> list[_Part]:
    """The union and its sums, a part for each owner."""
    got = _push(source, layout, group)
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
        counts = _union_sizes(union, group)
        slots, place = _compact(union, counts[group.rank]), union.cumsum(0) - 1
    sums = _zeros(counts[group.rank], got[0].values)
    for part in got:  # in rank order
        _add(sums, place[part.slots], part.values)
    sums = _finish(sums, layout.result, group.size if average else 1)
    lengths = [_length(count, layout, layout.result) for count in counts]
    message = _pack(union, slots, sums, layout)
    padded = torch.nn.functional.pad(message, (0, max(lengths) - len(message)))
    everything = padded.new_empty(group.size * len(padded))
    _all_gather(everything, padded, group=group.handle)
    pieces = everything.view(group.size, -1).unbind()
    return [
        _unpack(piece, layout, layout.result, count)
        for piece, count in zip(pieces, counts, strict=True)
    ]


def _push(source: _Source, layout: _Layout, group: _Group) -> list[_Part]:
    """Sends each owner its units; what came here, by rank."""
    spread = torch.cat([source.member, source.member.new_zeros(1)])[layout.unit_of]
    if layout.small:
        out = back = [layout.slots] * group.size
        flat = torch.arange(spread.numel(), device=spread.device)
    else:
        out, back = _sizes(spread, group)
        flat = _compact(spread.view(-1), sum(out))
    values = source.pick(layout.unit_of.view(-1)[flat]).split(out)
    slots = (flat % layout.slots).split(out)
    sent = torch.cat([_pack(spread[to], slots[to], values[to], layout) for to in range(group.size)])
    sent_bytes = [_length(count, layout, layout.wire) for count in out]
    received_bytes = [_length(count, layout, layout.wire) for count in back]
    received = sent.new_empty(sum(received_bytes))
    dist.all_to_all_single(received, sent, received_bytes, sent_bytes, group=group.handle)
    return [
        _unpack(piece, layout, layout.wire, count)
        for piece, count in zip(received.split(received_bytes), back, strict=True)
    ]


def _sizes(spread: torch.Tensor, group: _Group) -> tuple[list[int], list[int]]:
    """Units that go to each rank, and that come from each. Meets the host, once."""
    out = spread.sum(1)
    back = torch.empty_like(out)
    dist.all_to_all_single(back, out, group=group.handle)
    to, come = torch.stack([out, back]).tolist()
    return to, come


def _union_sizes(union: torch.Tensor, group: _Group) -> list[int]:
    """Units of the union at each owner. Meets the host, once."""
    mine = union.sum().view(1)
    sizes = mine.new_empty(group.size)
    _all_gather(sizes, mine, group=group.handle)
    return [int(size) for size in sizes.tolist()]


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


# Adding, in operations whose results no device may choose: a NaN is treated in integers.


def _quiet(value: torch.Tensor) -> torch.Tensor:
    """The same NaNs, quiet."""
    bits = value.view(_BITS[value.dtype.itemsize])
    return (bits | (1 << (_MANTISSA[value.dtype] - 1))).view(value.dtype)


def _add(sums: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """sums[at] += values, `at` distinct; of two NaNs that of `sums` stays, made quiet."""
    old, values = sums[at], _widen(values)
    new = old + values
    if new.is_floating_point():
        none = torch.full_like(new, _NO_NUMBER[new.dtype], dtype=_BITS[new.dtype.itemsize])
        new = torch.where(new.isnan(), none.view(new.dtype), new)
        new = torch.where(values.isnan(), _quiet(values), new)
        new = torch.where(old.isnan(), _quiet(old), new)
    sums.index_copy_(0, at, new)


def _widen(values: torch.Tensor) -> torch.Tensor:
    """16-bit floats as fp32, exactly; a NaN keeps its payload."""
    if values.dtype not in HALVES:
        return values
    bits = values.view(torch.int16).int()
    if values.dtype == torch.bfloat16:
        return (bits << 16).view(torch.float32)
    nan = (bits & -0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13
    return torch.where(values.isnan(), nan.view(torch.float32), values.float())


def _finish(sums: torch.Tensor, dtype: torch.dtype, divisor: int) -> torch.Tensor:
    """The sums divided once, and rounded once to `dtype`."""
    if divisor != 1:
        # By a tensor: torch turns a plain number into a product with its inverse on some devices.
        quotient = sums / torch.full_like(sums[:1], divisor)
        sums = torch.where(sums.isnan(), sums, quotient)
    if dtype == sums.dtype:
        return sums
    bits = sums.view(torch.int32)
    shift = _MANTISSA[torch.float32] - _MANTISSA[dtype]
    top = bits >> 16
    nan = (top & -0x8000) | _EXPONENT[dtype] | (1 << (_MANTISSA[dtype] - 1))
    nan = nan | ((bits >> shift) & ((1 << _MANTISSA[dtype]) - 1))
    return torch.where(sums.isnan(), nan.to(torch.int16).view(dtype), sums.to(dtype))
