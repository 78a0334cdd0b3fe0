"""`zensync.attach` on FSDP2 modules: reduce-scatters of units that hold tables, by non-zeros.

FSDP2 hands a custom reduce-scatter one flat buffer per unit, rank-major: for each rank the parts of
all parameters of the unit, one behind the other, padded to equal lengths, without names
(docs/sharding.md). So where each parameter lies follows from shapes. Tables are sent as the push of
ZEN (OSDI'25, section 3), the unit's other parameters by the group's own reduce-scatter. A unit
without tables is left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from . import _scatter, _torch_compat
from ._mesh import refuse_mesh
from ._names import is_table_shape
from ._tensors import DTYPES
from .errors import Error, UnsupportedError
from .reduce import AVG, SUM
from .state import State

TO_DENSE_ABOVE = 0.5  # largest density over ranks: the push moves as many bytes as there are units
TO_SPARSE_BELOW = 0.4
PROBE_EVERY = 64  # dense rounds until a table is sent sparse once, to see
_MOST_SUBSETS = 12  # parameters of a unit, up to which those with a gradient are told by sizes
_logger = logging.getLogger("zensync.tuning")
_states: weakref.WeakKeyDictionary[torch.nn.Module, State] = weakref.WeakKeyDictionary()
# Newer versions of torch have another name for it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether `module` has FSDP2 units."""
    return any(_torch_compat.is_fsdp_unit(part) for part in module.modules())


@dataclass
class Piece:
    """A parameter's part of the buffer, and which way it goes; equal on all ranks.

    rows, row_elems: of one rank's part, padded.
    """

    name: str
    rows: int
    row_elems: int
    is_table: bool
    is_dense: bool = False
    dense_rounds: int = 0

    @property
    def length(self) -> int:
        return self.rows * self.row_elems

    def goes_sparse(self) -> bool:
        """Whether its next sum is sent by non-zeros. Counts the rounds until the next probe."""
        if not self.is_table:
            return False
        self.dense_rounds = self.dense_rounds + 1 if self.is_dense else 0
        return self.dense_rounds % PROBE_EVERY == 0

    def learn(self, units: int, largest: int) -> None:
        """From a sum of `units` units: the most that a rank had."""
        density = largest / units if units else 0.0
        bound = TO_SPARSE_BELOW if self.is_dense else TO_DENSE_ABOVE
        if self.is_dense != (density > bound):
            self.is_dense, self.dense_rounds = not self.is_dense, 0
            way = "dense" if self.is_dense else "sparse"
            _logger.info('zensync: "%s" goes %s: density %.3g', self.name, way, density)


class TableReduceScatter:
    """What an FSDP2 unit calls in place of its group's reduce-scatter. Ends before it returns."""

    def __init__(self, state: State, pieces: Sequence[Piece]) -> None:
        self._state = state
        self._pieces = list(pieces)
        self._present: dict[int, list[Piece] | None] = {
            sum(piece.length for piece in pieces): self._pieces
        }
        self._scratch: dict[str, torch.Tensor] = {}
        self._told: set[str] = set()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer, as torch's own way has it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums or averages `input_tensor` [n · k]; this rank's part goes to `output_tensor` [k]."""
        del async_op  # nobody waits for a work on CPUs
        self._state.require_usable()
        ways = self._ways(output_tensor.numel(), output_tensor.dtype, op)
        if not any(sparse for _, sparse in ways):
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        table = input_tensor.view(self._state.size, -1)
        works, rest, at = [], [], 0
        for piece, sparse in ways:
            part = slice(at, at + piece.length)
            at += piece.length
            if sparse:
                works.append((piece, self._start(piece, table[:, part], output_tensor[part], op)))
            else:
                rest.append(part)
        if rest:
            _reduce_rest(output_tensor, table, rest, (group, op))
        for piece, work in works:
            work.wait()
            report = self._state.reports[piece.name]
            piece.learn(piece.rows * self._state.size, report["largest_units"])

    def _ways(self, length: int, dtype: torch.dtype, op: Any) -> list[tuple[Piece, bool]]:
        """The pieces that are there, and which go sparse; none if that cannot be told."""
        if dtype not in DTYPES or op not in (SUM, AVG):
            self._warn(f"{dtype} reduced by {op}")
            return []
        if length not in self._present:
            self._present[length] = subset_of(self._pieces, length)
        pieces = self._present[length]
        if pieces is None:
            self._warn("gradients for some parameters only, whose sizes do not say for which")
            return []
        return [(piece, piece.goes_sparse()) for piece in pieces]

    def _warn(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            tables = ", ".join(piece.name for piece in self._pieces if piece.is_table)
            _logger.warning("zensync: the FSDP2 unit of %s goes dense: it has %s", tables, why)

    def _start(self, piece: Piece, source: torch.Tensor, target: torch.Tensor, op: Any) -> Any:
        """A reduce-scatter by rows of [n · rows, row_elems]: rank r's part is r's rows."""
        shape = (self._state.size * piece.rows, piece.row_elems)
        if not source.is_contiguous():
            kept = self._scratch.get(piece.name)
            if kept is None or kept.dtype != source.dtype:
                kept = self._scratch[piece.name] = torch.empty(source.shape, dtype=source.dtype)
            source = kept.copy_(source)
        return _scatter.reduce_scatter(
            target.view(piece.rows, piece.row_elems),
            source.view(shape),
            op,
            name=piece.name,
            state=self._state,
            async_op=True,
        )


def _reduce_rest(
    output: torch.Tensor, table: torch.Tensor, rest: list[slice], how: tuple[Any, Any]
) -> None:
    """The parts of the buffer that go through the group's own reduce-scatter, in one piece."""
    group, op = how
    source = torch.cat([table[:, part] for part in rest], dim=1)
    target = source.new_empty(source.shape[1])
    _reduce_scatter(target, source.view(-1), op=op, group=group)
    lengths = [part.stop - part.start for part in rest]
    for part, got in zip(rest, target.split(lengths), strict=True):
        output[part] = got


def subset_of(pieces: Sequence[Piece], length: int) -> list[Piece] | None:
    """The one choice of pieces, in their order, of that length in all; None: no or several ones."""
    if len(pieces) > _MOST_SUBSETS:
        return None
    found: list[list[Piece]] = []
    for bits in range(1 << len(pieces)):
        chosen = [piece for at, piece in enumerate(pieces) if bits >> at & 1]
        if sum(piece.length for piece in chosen) == length:
            found.append(chosen)
            if len(found) > 1:
                return None
    return found[0] if found else None


def piece_of(name: str, one: _torch_compat.FsdpParameter, size: int, is_table: bool) -> Piece:
    """Where a rank's part has rows: along axis 0, whichever axis is cut (torch puts the parts of
    another axis below each other)."""
    first = one.shape[0] if one.shape else 1
    rest = math.prod(one.shape[1:])
    if one.dim == 0:
        return Piece(name, -(-first // size), rest, is_table)
    return Piece(name, first, rest // size, is_table)


def attach_fsdp(module: torch.nn.Module, group: Any, options: dict[str, Any]) -> State:
    """As `zensync.attach`. A collective call."""
    units = _torch_compat.fsdp_units(module)
    named = {id(one): name for name, one in module.named_parameters()}
    try:
        _require_attachable(module, units, named)
        tables = _tables_of(module)
        own = [unit for unit in units if any(id(one.sharded) in tables for one in unit.parameters)]
        used = _one_group(units, own, group)
    except Error as why:
        for one in {unit.group for unit in units} - {None}:
            refuse_mesh(one, why)
        raise
    state = State(used, module=module, **options)
    weak = weakref.ref(module)
    state.set_no_sync(lambda: _no_sync(weak()))
    _states[module] = state
    if state.disabled or state.size == 1:
        return state
    for unit in own:
        pieces = [
            piece_of(named[id(one.sharded)], one, state.size, id(one.sharded) in tables)
            for one in unit.parameters
            if one.sharded.requires_grad
        ]
        unit.module.set_custom_reduce_scatter(TableReduceScatter(state, pieces))
    return state


def _require_attachable(
    module: torch.nn.Module, units: Sequence[_torch_compat.FsdpUnit], named: dict[int, str]
) -> None:
    before = _states.get(module)
    if before is not None and not before.is_closed:
        raise Error("a State is attached to this module already; close() that one first")
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise UnsupportedError(
                f'"{name}" has sparse=True: FSDP2 takes no COO gradients; use sparse=False, '
                "zensync finds the rows that are not zero by itself"
            )
    managed = {id(one.sharded) for unit in units for one in unit.parameters}
    loose = [name for key, name in named.items() if key not in managed]
    if loose:
        raise UnsupportedError(
            f"{len(loose)} parameters belong to no FSDP2 unit ({loose[0]}, …); call fully_shard on "
            "the whole module too"
        )


def _one_group(
    units: Sequence[_torch_compat.FsdpUnit], own: Sequence[_torch_compat.FsdpUnit], group: Any
) -> dist.ProcessGroup:
    """The group that all units with tables are sharded over."""
    if not own:
        raise UnsupportedError("no FSDP2 unit has a table; nothing would change")
    used = own[0].group
    if used is None or any(unit.group is not used for unit in own):
        raise UnsupportedError("the units that hold tables must be sharded, over one group")
    if group is not None and group is not used:
        raise Error("group= is not the group that the module is sharded over; leave it out")
    modules = [id(unit.module) for unit in units]
    if any(modules.count(id(unit.module)) > 1 for unit in own):
        raise UnsupportedError("a unit with parameters on several meshes takes no custom comm")
    for unit in own:
        if unit.device.type != "cpu":
            raise UnsupportedError(
                f"{type(unit.module).__name__} computes on {unit.device}: FSDP2 modules are "
                "supported on CPUs only in this version"
            )
    found: dist.ProcessGroup = used
    return found


def _tables_of(module: torch.nn.Module) -> set[int]:
    """Ids of parameters that are embeddings and not tied to another layer, or have that shape."""
    tables: set[int] = set()
    others: set[int] = set()
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
            tables.update(id(one) for one in own)
        elif not type(part).__module__.startswith("torch.nn."):
            tables.update(id(one) for one in own if is_table_shape(one))
        else:
            others.update(id(one) for one in own)
    return tables - others


@contextlib.contextmanager
def _no_sync(module: torch.nn.Module | None) -> Iterator[None]:
    units = [] if module is None else _torch_compat.fsdp_units(module)
    before = [unit.syncs() for unit in units]
    for unit in units:
        unit.set_syncs((False, False))
    try:
        yield
    finally:
        for unit, syncs in zip(units, before, strict=True):
            unit.set_syncs(syncs)


def by_columns(parameter: torch.nn.Parameter) -> Any:
    """For `fully_shard(..., shard_placement_fn=zensync.by_columns)`: tables are cut by columns.

    A rank then owns a part of every row, so that all ranks get equally much whichever rows are
    touched; rows in the order of their frequency leave most of the work to the first rank.
    parameter: `Shard(1)` for those of the shape of a table ([V, D], V ≥ 4096 and V ≥ 16·D); the
    number of ranks must divide D. Other ones: None, torch's own choice.
    """
    from torch.distributed.tensor import Shard

    return Shard(1) if is_table_shape(parameter) else None
