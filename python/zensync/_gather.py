"""`zensync.all_gather_rows`: rows of a table whose shards are on all ranks, those that are needed.

The way back of a sharded optimiser (`_scatter.py` is the way there): a rank fetches the rows that
its next batch touches from the ranks that own them, not the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _plain
from ._scatter import COLUMNS, ROWS, Cut, require_dense, told_to_all
from ._tensors import spec_of
from .errors import Error, UnsupportedError
from .reduce import Work, require_name, state_for
from .state import State


def all_gather_rows(
    param: torch.Tensor,
    rows: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    layout: str = ROWS,
    total_rows: int | None = None,
    name: str | None = None,
    state: State | None = None,
) -> torch.Tensor:
    """Rows of a table by their ids, from the ranks that hold them; a collective call.

    param: this rank's shard of a table [V, D…], dense-stored, CPU, of a dtype of `all_reduce`; cut
    as `reduce_scatter` cuts by `layout`, perhaps padded to ⌈V/n⌉ rows. It is only read.
    rows: int64 ids in [0, V), of any shape, in any order, repeated or none; each rank its own.
    total_rows: V. Needed by "rows" where ranks have different numbers of rows; default: n times
    those of `param`.
    Gives [*rows.shape, D…], bit for bit, without autograd.
    Bytes: a few bits to a few bytes for each distinct id, and its row, once.
    name: key of its report in `state.stats()["tensors"]`; there owner_units is ids asked of each.
    Errors: as `reduce_scatter`; an id outside [0, V) on one rank ends the State on all ranks.
    """
    require_name(name)
    used = state_for(group, state)
    used.require_waitable("all_gather_rows")
    with told_to_all(used, name or "all_gather_rows"):
        cut = _cut_of(param, layout, total_rows, used)
        ids = _ids_of(rows, cut.whole_shape[0])
    shape = (*rows.shape, *cut.whole_shape[1:])
    if used.disabled:
        return _run_plain(cut, param, ids, used.group).reshape(shape)
    output = torch.empty(shape, dtype=param.dtype)
    options = _core.JobOptions(name or _default_name(cut, param.dtype), _core.ReduceOp.SUM)
    pending = used.call(_starter(used, (cut, param, ids, output), options), options.name)
    Work(pending, output, "all_gather_rows").wait()
    return output


def _starter(
    state: State,
    given: tuple[Cut, torch.Tensor, torch.Tensor, torch.Tensor],
    options: _core.JobOptions,
) -> Callable[[], Callable[[], Any]]:
    cut, param, ids, output = given
    shard = param.detach().resolve_neg().contiguous()  # itself, if the core can read it

    def start() -> Callable[[], Any]:
        table = cut.core_spec(param.dtype)
        count = ids.numel() if output.numel() else 0
        job = state.submitted(
            state.engine.submit_gather_rows(
                _core.DenseTensor(shard.data_ptr(), spec_of(shard)),
                (ids.data_ptr(), count, output.data_ptr()),
                (table, cut.layout == ROWS),
                options,
            )
        )
        return lambda: state.await_job(job, options.name)

    return start


def _cut_of(param: torch.Tensor, layout: str, total_rows: int | None, state: State) -> Cut:
    """How the table is cut of which `param` is this rank's part. Error if it is not one."""
    require_dense("param", param)
    if param.dim() == 0:
        raise UnsupportedError("a tensor of shape [] has no rows")
    first, *rest = param.shape
    if layout == COLUMNS and rest:
        rest[0] *= state.size
    if total_rows is None:
        total_rows = first * state.size if layout == ROWS else first
    is_count = isinstance(total_rows, int) and not isinstance(total_rows, bool)
    if not is_count or total_rows < 0:
        raise Error(f"total_rows= must be a number of rows, not {total_rows!r}")
    cut = Cut((total_rows, *rest), layout, state.size)
    own = cut.shape(state.rank)[0]
    if first not in (own, cut.most_rows):
        or_padded = "" if own == cut.most_rows else f" or {cut.most_rows}"
        raise Error(
            f"param has {first} rows; the part of rank {state.rank} of {state.size} of a table of "
            f"{total_rows} rows by {layout} has {own}{or_padded}"
        )
    return cut


def _ids_of(rows: torch.Tensor, limit: int) -> torch.Tensor:
    """The ids, contiguous. Error unless they are int64, on the CPU, and in [0, limit)."""
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.int64:
        raise Error("rows= must be an int64 tensor of row ids")
    if rows.device.type != "cpu" or rows.layout != torch.strided:
        raise UnsupportedError("rows= must be a dense-stored CPU tensor")
    ids = rows.detach().contiguous()
    outside = (ids < 0) | (ids >= limit)
    if bool(outside.any()):
        raise Error(f"rows= has row {int(ids[outside][0])}, which is outside [0, {limit})")
    return ids


def _run_plain(
    cut: Cut, param: torch.Tensor, ids: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """As `all_gather_rows` with ZENSYNC_DISABLE=1: the whole table, by the group's all-gather."""
    with torch.no_grad():
        shard = param.detach().resolve_neg()
        part = shard.new_zeros((cut.most_rows, *shard.shape[1:]))
        part[: len(shard)] = shard
        parts = _plain.gather(part, group)
        whole = torch.cat(parts, dim=0 if cut.layout == ROWS else 1)
        return whole[ids.reshape(-1)]


def _default_name(cut: Cut, dtype: torch.dtype) -> str:
    shape = ",".join(str(length) for length in cut.whole_shape)
    return f"all_gather_rows {str(dtype).removeprefix('torch.')}[{shape}]"
