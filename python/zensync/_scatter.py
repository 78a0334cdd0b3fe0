"""`zensync.reduce_scatter`: the sum of a dense-stored tensor over a group, each rank its own part.

For sharded optimisers: the first half of an all-reduce by non-zeros, for owners that are given.
`layout="rows"` cuts as `torch.chunk` and FSDP2 do, `layout="columns"` every row into equal parts.
What is wrong with the arguments of one rank is told to all ranks, none of which then waits for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _plain
from ._check import Part
from ._tensors import DTYPES, plain_name, require_supported
from ._worker import Pending
from .errors import Error, UnsupportedError
from .reduce import SUM, Work, is_average, mode_of, require_name, state_for
from .state import State

ROWS, COLUMNS = "rows", "columns"


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  (torch's name for it)
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    layout: str = ROWS,
    name: str | None = None,
    async_op: bool = False,
    state: State | None = None,
) -> Work | None:
    """Sums (or averages) `input` over the group; this rank's part goes to `output`. Collective.

    input: [V, D…], dense-stored, CPU, of one shape and dtype (those of `all_reduce`) on all ranks.
    It is left alone, but for +0.0 in place of -0.0. output: of its dtype; n ranks; shares no memory
    with `input`.
    layout: "rows": rank r gets rows [r·⌈V/n⌉, (r+1)·⌈V/n⌉), the last ranks fewer or none; output
    has these rows, or ⌈V/n⌉ of them, the rest of which become +0.0. "columns": n divides D, rank r
    gets [:, r·D/n : (r+1)·D/n].
    op, name, async_op, state: as for `all_reduce`. Bits are those of `all_reduce` with "balanced".
    `state.stats()["tensors"][name]` has owner_units (sent to each owner), imbalance (largest/mean).
    Errors: as `all_reduce`; wrong arguments of one rank end the State on all ranks.
    """
    require_name(name)
    used = state_for(group, state)
    if not async_op:
        used.require_waitable("reduce_scatter")
    label = name or f"reduce_scatter {_default_name(input)}"
    with told_to_all(used, label):
        shards = Shards(input, layout, used.size)
        own = shards.part_of(output, used.rank)
        average = is_average(op, input)
    if used.disabled:
        return _run_plain(used, shards, (output, own), average, async_op)
    options = _core.JobOptions(label, _core.ReduceOp.AVG if average else _core.ReduceOp.SUM)
    start = submit(used, shards, own, options)

    def start_all() -> Callable[[], Any]:
        run = start()

        def finish() -> list[torch.Tensor]:
            run()
            with mode_of(output):
                _padding(output, own).zero_()
            return [output]

        return finish

    work = Work(used.call(start_all, label), output, "reduce_scatter")
    if async_op:
        return work
    work.wait()
    return None


@contextlib.contextmanager
def told_to_all(state: State, name: str) -> Iterator[None]:
    """What is wrong with this rank's arguments is told to the others, which would wait for it."""
    try:
        yield
    except Error as why:
        told = type(why)(why.message, culprit=state.rank, tensor=name)
        state.give_up(told)
        raise told from why


class Cut:
    """How a tensor of `shape` is cut into parts, one for each rank. UnsupportedError, Error."""

    def __init__(self, shape: Sequence[int], layout: str, size: int) -> None:
        if layout not in (ROWS, COLUMNS):
            raise Error(f'layout= must be "rows" or "columns", not {layout!r}')
        if len(shape) < (1 if layout == ROWS else 2):
            raise UnsupportedError(f"a tensor of shape {list(shape)} has no {layout} to cut")
        if layout == COLUMNS and shape[1] % size != 0:
            raise UnsupportedError(f"{shape[1]} columns cannot be cut into {size} equal parts")
        self.whole_shape, self.layout, self.size = tuple(shape), layout, size

    def core_spec(self, dtype: torch.dtype) -> _core.TensorSpec:
        """The whole tensor, for the core. Empty ones have no rows."""
        rows = self.whole_shape[0] if math.prod(self.whole_shape) else 0
        row_elems = math.prod(self.whole_shape[1:]) or self.size
        return _core.TensorSpec(rows, row_elems, DTYPES[dtype])

    @property
    def most_rows(self) -> int:
        """Rows of the largest part."""
        rows = self.whole_shape[0]
        return -(-rows // self.size) if self.layout == ROWS else rows

    def shape(self, rank: int) -> tuple[int, ...]:
        """Of the part of `rank`."""
        first, *rest = self.whole_shape
        if self.layout == COLUMNS:
            return (first, rest[0] // self.size, *rest[1:])
        begin = min(rank * self.most_rows, first)
        return (min(self.most_rows, first - begin), *rest)

    def place(self, rank: int) -> Part:
        """Of the part of `rank`, in the whole as [V, elements of a row]."""
        shape = self.shape(rank)
        if self.layout == ROWS:
            begin = min(rank * self.most_rows, self.whole_shape[0])
            return Part(range(begin, begin + shape[0]), slice(None))
        width = math.prod(shape[1:])
        return Part(range(shape[0]), slice(rank * width, (rank + 1) * width))


class Shards(Cut):
    """A dense-stored tensor and how it is cut. UnsupportedError, Error."""

    def __init__(self, whole: torch.Tensor, layout: str, size: int) -> None:
        require_dense("input", whole)
        super().__init__(whole.shape, layout, size)
        self.whole = whole

    @property
    def spec(self) -> _core.TensorSpec:
        """The whole tensor, for the core."""
        return self.core_spec(self.whole.dtype)

    def part_of(self, output: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of `output` that the sum goes to: all, or all but a padding. Error."""
        require_dense("output", output)
        if output.dtype != self.whole.dtype:
            raise Error(f"output is {output.dtype}, but input {self.whole.dtype}")
        shape = self.shape(rank)
        padded = (self.most_rows, *shape[1:])
        if output.shape not in (torch.Size(shape), torch.Size(padded)):
            or_padded = "" if padded == shape else f" or {list(padded)}"
            raise Error(
                f"output has shape {list(output.shape)}; the part of rank {rank} of {self.size} of "
                f"an input {list(self.whole.shape)} by {self.layout} has {list(shape)}{or_padded}"
            )
        return output.detach()[: shape[0]]

    def pieces(self) -> list[torch.Tensor]:
        """One for each rank, all of one shape, contiguous; rows that are missing are 0."""
        whole = self.whole.detach().resolve_neg()
        if self.layout == COLUMNS:
            return [part.contiguous() for part in whole.chunk(self.size, dim=1)]
        padded = whole.new_zeros((self.most_rows * self.size, *whole.shape[1:]))
        padded[: len(whole)] = whole
        return [padded[r * self.most_rows :][: self.most_rows] for r in range(self.size)]


def submit(
    state: State, shards: Shards, own: torch.Tensor, options: _core.JobOptions
) -> Callable[[], Callable[[], Any]]:
    """What `state.call` takes: the job of one reduce-scatter into `own` (`Shards.part_of`).

    `own` and the whole tensor must not be touched until the call has ended.
    """
    whole = shards.whole
    with mode_of(whole):
        used = whole.detach().resolve_neg().contiguous()  # itself, if the core can read it
    is_plain = own.is_contiguous() and not own.is_neg()
    target = own if is_plain else torch.empty(own.shape, dtype=own.dtype)

    def start() -> Callable[[], Any]:
        view = _core.DenseTensor(used.data_ptr(), shards.spec)
        by_rows = shards.layout == ROWS
        average = options.op == _core.ReduceOp.AVG
        place = shards.place(state.rank)
        check = state.checks.shard(options.name, used, target, (place, average))
        job = state.submitted(
            state.engine.submit_reduce_scatter(view, target.data_ptr(), by_rows, options)
        )

        def run() -> None:
            state.await_job(job, options.name)
            if check is not None:
                check.compare(state)
            if target is not own:
                with mode_of(own):
                    own.copy_(target)

        return run

    return start


def _run_plain(
    state: State,
    shards: Shards,
    outputs: Sequence[torch.Tensor],
    average: bool,
    async_op: bool,
) -> Work | None:
    """As `reduce_scatter` with ZENSYNC_DISABLE=1; has ended when it returns."""
    output, own = outputs
    with mode_of(output):
        _plain.reduce_scatter(own, shards.pieces(), average, state.group)
        _padding(output, own).zero_()
    if not async_op:
        return None
    pending = Pending(lambda: None)
    pending.end([output], None)
    return Work(pending, output, "reduce_scatter")


def _padding(output: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return output.detach()[len(own) :]


def require_dense(what: str, tensor: torch.Tensor) -> None:
    """UnsupportedError unless `tensor` is dense-stored, on the CPU, and one that can be summed."""
    require_supported(tensor)
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"{what} is on {tensor.device}; shards are for CPU tensors in this version"
        )
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{what} is a COO tensor; shards are for dense-stored ones")


def _default_name(tensor: Any) -> str:
    return plain_name(tensor) if isinstance(tensor, torch.Tensor) else "tensor"
