"""`zensync.all_reduce`: sums one tensor over the ranks of a group, in place, by its non-zeros.

Checks first, so that what is not supported is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _device_sums, _plain
from ._arguments import require_group
from ._default_state import default_state
from ._dense import MAX
from ._device import require_device
from ._device_sums import Sum
from ._tensors import CooParts, mode_of, plain_name, require_supported, sorted_ids, spec_of
from ._worker import Pending
from .errors import DeadlineError, Error, UnsupportedError
from .state import State

SUM = dist.ReduceOp.SUM
AVG = dist.ReduceOp.AVG


class Work:
    """A call under way. Its tensors must not be touched until it has ended."""

    def __init__(self, pending: Pending, tensor: torch.Tensor, what: str = "all_reduce") -> None:
        self._pending = pending
        self._tensor = tensor
        self._what = what

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the end; True. Raises the job's error; DeadlineError after `timeout_s`."""
        if not self._pending.wait(timeout_s):
            raise DeadlineError(f"{self._what} has not ended after {timeout_s} s; it goes on")
        if self._pending.error is not None:
            raise self._pending.error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._pending.done()

    def exception(self) -> Error | None:
        """The error it ended with, if it has."""
        return self._pending.error

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of [tensor], as torch's works give it."""
        return self._pending.future

    def result(self) -> list[torch.Tensor]:
        """[tensor], after waiting."""
        self.wait()
        return [self._tensor]


def all_reduce(
    tensor: torch.Tensor,
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    name: str | None = None,
    rows: torch.Tensor | None = None,
    async_op: bool = False,
    state: State | None = None,
) -> Work | None:
    """Sums (or averages) `tensor` over the group, in place; a collective call.

    tensor: on the CPU, or on a device for which the group has a backend; float32, float64,
    bfloat16, float16, int32, int64; dense-stored of any strides, or COO, which comes back
    coalesced. [V, D…] is summed by rows. op: SUM or AVG (floats only).
    name: its key; calls with one key share counts. Default: dtype, shape, layout.
    rows: int64 ids of the rows (dense-stored only) outside which this rank's tensor holds +0.0
    (not -0.0) in every element: no scan is made, so what else is there stays on this rank only.
    async_op: returns a Work at once; needed in callbacks of the State's own futures.
    state: a State in place of the group's default one.
    Errors: UnsupportedError before anything is sent; MismatchError on all ranks when they disagree.
    """
    require_supported(tensor)
    average = is_average(op, tensor)
    is_coo = tensor.layout == torch.sparse_coo
    if rows is not None and is_coo:
        raise Error("rows= is for dense-stored tensors; a COO tensor has its own indices")
    require_name(name)
    used = state_for(group, state, tensor.device)
    if used.disabled:
        return _plain.all_reduce(tensor, average, used.group, async_op)
    if not async_op:
        used.require_waitable("all_reduce")
    key = name or plain_name(tensor)
    if is_coo:
        pending = call_coo(used, tensor, key, average, in_place=True)
    else:
        pending = _call_strided(used, tensor, Sum(key, average), rows)
    work = Work(pending, tensor)
    if async_op:
        return work
    work.wait()
    return None


def state_for(
    group: dist.ProcessGroup | None, state: State | None, device: torch.device | None = None
) -> State:
    """The State of a call with these arguments. Error if they do not fit, or it is closed;
    UnsupportedError if it cannot sum on `device`."""
    if state is not None and not isinstance(state, State):
        raise Error(f"state= must be a zensync.State, not {type(state).__name__}")
    if state is not None and group is not None and state.group is not group:
        raise Error("group= and state= name different groups; give one of them")
    if device is not None and device.type != "cpu":
        require_device(device, require_group(group) if state is None else state.group)
    used = default_state(group) if state is None else state
    used.require_usable()
    return used


def require_name(name: Any) -> None:
    """Error unless `name` is None, or a text that can be a key."""
    try:
        if name is None or name.encode():
            return
    except (AttributeError, UnicodeEncodeError):
        pass
    raise Error(f"name= must be a text that is not empty, not {name!r}")


def is_average(op: Any, tensor: torch.Tensor) -> bool:
    """Whether `op` is AVG. UnsupportedError if `tensor` cannot be reduced by it."""
    if op == SUM:
        return False
    if op != AVG:
        raise UnsupportedError(f"reduction {op} is not supported; use ReduceOp.SUM or ReduceOp.AVG")
    if not tensor.is_floating_point():
        raise UnsupportedError("integers cannot be averaged without loss; use SUM and divide")
    return True


def dense_fallback(state: State, tensor: torch.Tensor, average: bool, name: str) -> None:
    """What all ranks do when they have agreed on the dense all-reduce. On the worker's thread."""
    state.dense.sum_rounded_once(tensor, average, name)


def _call_strided(
    state: State, tensor: torch.Tensor, one: Sum, rows: torch.Tensor | None
) -> Pending:
    spec, options = spec_of(tensor), _core.JobOptions(one.name, one.op)
    known = None if rows is None else sorted_ids(rows, spec.rows, tensor.device)
    held = () if known is None else (known,)
    if (passage := state.groups.passage(tensor, *held)) is not None:

        def start_there() -> Callable[[], Any]:
            return _device_sums.start_dense(state, tensor, one, known)

        return state.call(start_there, one.name, passage)
    ids = _EMPTY_IDS[:0] if known is None else known
    with mode_of(tensor):
        whole = tensor.detach()
        used = whole.resolve_neg().contiguous()  # itself, if it can be summed in place

    def start() -> Callable[[], Any]:
        average = options.op == _core.ReduceOp.AVG
        check = state.checks.dense(options.name, used, average)
        ids_at = 0 if rows is None else _address(ids)
        view = _core.DenseTensor(used.data_ptr(), spec, ids_at, ids.numel())
        job = state.submit_dense(view, options)

        def run() -> list[torch.Tensor]:
            outcome = state.await_job(job, options.name)
            with mode_of(tensor):
                if outcome == _core.Outcome.USE_DENSE:
                    dense_fallback(state, used, average, options.name)
                if check is not None:
                    check.compare(state)
                if used.data_ptr() != whole.data_ptr():
                    whole.copy_(used)
            return [tensor]

        return run

    return state.call(start, options.name)


def _address(ids: torch.Tensor) -> int:
    """A pointer that is not null also where there are no ids: "no rows" is not "not known"."""
    return ids.data_ptr() or _EMPTY_IDS.data_ptr()


_EMPTY_IDS = torch.zeros(1, dtype=torch.int64)


def submit_coo(
    state: State, parts: CooParts, options: _core.JobOptions
) -> Callable[[], torch.Tensor]:
    """Submits a COO tensor; what it returns, run on the worker, gives the coalesced sum."""
    check = state.checks.coo(options.name, parts, options.op == _core.ReduceOp.AVG)
    job = state.submit_coo(parts.core_tensor(), options)

    def run() -> torch.Tensor:
        result = finish()
        if check is not None:
            check.compare(state, result)
        return result

    def finish() -> torch.Tensor:
        if state.await_job(job, options.name) == _core.Outcome.DONE:
            return parts.fetch(job)
        dense, member = parts.dense(), parts.member()
        dense_fallback(state, dense, options.op == _core.ReduceOp.AVG, options.name)
        state.dense.all_reduce(
            member, MAX, options.name
        )  # the union, also of rows that add up to zero
        return parts.from_dense(dense, member)

    return run


def call_coo(
    state: State, tensor: torch.Tensor, name: str, average: bool, *, in_place: bool = False
) -> Pending:
    """Makes the call that sums a COO tensor, wherever it lies; its value is the coalesced sum, or
    with in_place [tensor], which then has it."""
    state.require_coo()
    require_device(tensor.device, state.group)
    one = Sum(name, average)
    with mode_of(tensor):
        parts = CooParts.of(tensor)
        coalesced = tensor.is_coalesced()
    passage = state.groups.passage(tensor, parts.indices, parts.values)

    def start() -> Callable[[], Any]:
        if passage is not None:
            finish = _device_sums.start_coo(state, parts, coalesced, one)
        else:
            finish = submit_coo(state, parts, _core.JobOptions(name, one.op))

        def run() -> list[torch.Tensor] | torch.Tensor:
            with mode_of(tensor):
                # Not into a detached tensor: that has indices of its own, and only those would be
                # replaced.
                return [tensor.copy_(finish())] if in_place else finish()

        return run

    return state.call(start, name, passage)
