"""Sums of tensors on devices, inside a call of a State: what `all_reduce`, the hook and `attach` do
there in place of jobs of the engine.

Ranks agree on each job over the mesh first, so that one that disagrees is named before anybody
enters a collective of the device, which could not be left. Then all is the worker's, one sum at a
time, on the State's side stream: `torch_path.py`, or the dense all-reduce (`_device_plan.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import _core, torch_path
from ._bucket import BucketPlan, Rest
from ._debug import say_job
from ._dense import MAX, DenseGroup
from ._device_plan import Choice
from ._exact import BITS
from ._tensors import DTYPES, CooParts, mode_of, spec_of
from .state import State


@dataclass(frozen=True)
class Sum:
    """One sum, equal on all ranks. name: its key."""

    name: str
    average: bool
    starts_dense: bool = False

    @property
    def op(self) -> _core.ReduceOp:
        return _core.ReduceOp.AVG if self.average else _core.ReduceOp.SUM


def start_dense(
    state: State, tensor: torch.Tensor, one: Sum, ids: torch.Tensor | None
) -> Callable[[], list[torch.Tensor]]:
    """Submits a dense-stored tensor; what it returns, run on the worker, sums it in place."""
    agreed = _agree(state, tensor.device, [(one, spec_of(tensor))])

    def run() -> list[torch.Tensor]:
        state.await_job(agreed, None)
        with mode_of(tensor):
            _sum(state, tensor.detach(), one, ids)
        return [tensor]

    return run


def start_coo(
    state: State, parts: CooParts, coalesced: bool, one: Sum
) -> Callable[[], torch.Tensor]:
    """Submits a COO tensor; what it returns, run on the worker, gives the coalesced sum."""
    agreed = _agree(state, parts.indices.device, [(one, parts.spec)])

    def run() -> torch.Tensor:
        state.await_job(agreed, None)
        group = state.groups.of(parts.indices.device)
        choice = state.choices.of(one.name, _key(parts.spec))
        before = _Before.of(group)
        check = state.checks.coo(one.name, parts, one.average)
        if not choice.is_dense:
            result, counts = torch_path.reduce_coo(
                parts, coalesced, group, average=one.average, name=one.name
            )
            report = _note(choice, counts, parts.rows, state.rank)
        else:
            torch_path.require_inside(parts, group.rank, one.name)
            ids, values = torch_path.without_repeats(parts, coalesced)
            totals = _totals(group, len(ids), ids, one) if choice.is_probe_due() else None
            whole = values.new_zeros((parts.rows, parts.row_elems)).index_copy_(0, ids, values)
            member = parts.member()
            group.sum_rounded_once(whole, one.average, one.name)
            group.all_reduce(member, MAX, one.name)  # also rows that add up to zero
            result = parts.from_dense(whole, member)
            report = _note_dense(choice, totals, parts.rows)
        before.tell(state, one.name, group, report)
        if check is not None:
            check.compare(state, result)
        return result

    return run


def start_bucket(
    state: State, plan: BucketPlan, buffer: torch.Tensor, gradients: list[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """As `_dense_bucket.start_bucket`, for a buffer on a device."""
    sums = [Sum(one.name, True, one.starts_dense) for one in plan.large]
    whole = Sum(plan.rest_name, True)
    spec = _core.TensorSpec(buffer.numel(), 1, DTYPES[buffer.dtype], _core.Layout.DENSE)
    # Where parameters start is known to each rank alone, so it is agreed on too.
    starts = [
        (Sum(f"{one.name} starting {'dense' if one.starts_dense else 'sparse'}", True), one.spec)
        for one in plan.large
    ]
    agreed = _agree(state, buffer.device, [(whole, spec), *starts])

    def run() -> torch.Tensor:
        state.await_job(agreed, None)
        group = state.groups.of(buffer.device)
        sparse, taken = [], []
        for one, large in zip(sums, plan.large, strict=True):
            gradient = gradients[large.place]
            choice = state.choices.of(one.name, _key(spec_of(gradient)), one.starts_dense)
            if not choice.is_dense:
                sparse.append((one, gradient))
                begin = int(gradient.storage_offset() - buffer.storage_offset())
                taken.append((begin, begin + gradient.numel()))
                continue
            totals = _probe(group, gradient, one) if choice.is_probe_due() else None
            report = _note_dense(choice, totals, gradient.shape[0])
            _Before.of(group).tell(state, one.name, group, report)
        rest = Rest(buffer, taken)
        if rest.elems:
            # By the reciprocal, before the sum: bit for bit what DDP does without a hook.
            group.all_reduce(rest.gather(plan).mul_(1.0 / state.size), name=plan.rest_name)
            rest.put_back()
        for one, gradient in sparse:
            _sum(state, gradient, one, None)
        return buffer

    return run


def _key(spec: _core.TensorSpec) -> tuple[object, ...]:
    """What ranks have agreed on: they choose alike where it is the same."""
    return (spec.rows, spec.row_elems, spec.dtype, spec.layout)


def _agree(
    state: State, device: torch.device, sums: list[tuple[Sum, _core.TensorSpec]]
) -> _core.Job:
    """One small round: name, kind of device, shape, dtype, layout and op are those of all ranks."""
    state.choices.require()
    return state.agree(
        [
            (
                _core.DenseTensor(0, spec),
                _core.JobOptions(f"{one.name} on {device.type}", one.op),
                False,
            )
            for one, spec in sums
        ]
    )


def _sum(state: State, tensor: torch.Tensor, one: Sum, ids: torch.Tensor | None) -> None:
    """Sums a dense-stored tensor in place."""
    group = state.groups.of(tensor.device)
    choice = state.choices.of(one.name, _key(spec_of(tensor)), one.starts_dense)
    before = _Before.of(group)
    rows = tensor.shape[0] if tensor.dim() > 1 else tensor.numel()
    check = state.checks.dense(one.name, tensor, one.average)
    if not choice.is_dense:
        counts = torch_path.reduce_dense(tensor, group, average=one.average, name=one.name, ids=ids)
        report = _note(choice, counts, rows, state.rank)
    else:
        totals = _probe(group, tensor, one) if choice.is_probe_due() else None
        used = tensor.resolve_neg().contiguous()
        group.sum_rounded_once(used, one.average, one.name)
        if used.data_ptr() != tensor.data_ptr():
            tensor.copy_(used)
        report = _note_dense(choice, totals, rows)
    before.tell(state, one.name, group, report)
    if check is not None:
        check.compare(state)


def _probe(group: DenseGroup, tensor: torch.Tensor, one: Sum) -> list[int] | None:
    """Non-zero rows of each rank."""
    if tensor.numel() == 0:
        return None
    rows = tensor.shape[0] if tensor.dim() > 1 else tensor.numel()
    table = tensor.resolve_neg().reshape(rows, -1).contiguous()
    bits = table.view(BITS[table.dtype.itemsize])
    if table.is_floating_point():
        bits = bits << 1  # without signs: -0.0 is 0
    return _totals(group, int((bits != 0).any(1).sum()), table, one)


def _totals(group: DenseGroup, mine: int, like: torch.Tensor, one: Sum) -> list[int]:
    given = torch.tensor([mine], dtype=torch.int64, device=like.device)
    everyone = given.new_empty(group.size)
    group.all_gather(everyone, given, one.name)
    return [int(total) for total in everyone.tolist()]


def _note(
    choice: Choice, counts: torch_path.Counts | None, units: int, rank: int
) -> dict[str, Any]:
    choice.after(None if counts is None else counts.totals, units)
    report: dict[str, Any] = {"outcome": "done", "scheme": "torch_path", "units": 0}
    if counts is not None:
        report.update(units=counts.totals[rank], union_units=counts.union)
    return report


def _note_dense(choice: Choice, totals: list[int] | None, units: int) -> dict[str, Any]:
    choice.after(totals, units)
    return {"outcome": "use_dense", "scheme": "dense"}


@dataclass(frozen=True)
class _Before:
    """What a group had counted before a sum, and when that was."""

    sent_bytes: int
    received_bytes: int
    began: float

    @classmethod
    def of(cls, group: DenseGroup) -> _Before:
        return cls(group.sent_bytes, group.received_bytes, time.monotonic())

    def tell(self, state: State, name: str, group: DenseGroup, report: dict[str, Any]) -> None:
        """Keeps the report of a sum, with bytes of its exchanges and seconds on the host."""
        report.update(
            sent_bytes=group.sent_bytes - self.sent_bytes,
            received_bytes=group.received_bytes - self.received_bytes,
            seconds=time.monotonic() - self.began,
        )
        say_job(state.rank, name, report, state.reports.get(name))
        state.reports[name] = report
