"""A flat buffer of several gradients, averaged: large ones that are mostly zeros are sent sparse,
in place, the rest goes through the State's dense all-reduce (`_dense.py`) in one piece.

Called by the hook of DDP (`ddp_hook.py`) and by `attach` (`_parcels.py`), inside a call of a State.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from . import _core, _device_sums
from ._bucket import BucketPlan, LargeParameter, Rest
from ._device import require_device
from ._tensors import DTYPES
from ._worker import Pending
from .reduce import dense_fallback
from .state import State

_AVG = _core.ReduceOp.AVG


def call_bucket(
    state: State, plan: BucketPlan, buffer: torch.Tensor, gradients: list[torch.Tensor]
) -> Pending:
    """Makes the call that averages a buffer, wherever it lies."""
    require_device(buffer.device, state.group)
    passage = state.groups.passage(buffer)
    if passage is not None:
        return state.call(
            lambda: _device_sums.start_bucket(state, plan, buffer, gradients), plan.title, passage
        )
    return state.call(lambda: start_bucket(state, plan, buffer, gradients), plan.title)


def start_bucket(
    state: State, plan: BucketPlan, buffer: torch.Tensor, gradients: list[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Submits the jobs of a buffer; what it returns, run on the worker, gives it averaged.

    gradients: views of `buffer`, one per parameter; needed only if `plan` has large ones.
    """
    sparse, probed = _split(state, plan)
    rest = Rest(buffer, [_range(gradients[one.place], buffer) for one in sparse])
    agreed = _agree(state, plan, rest, [(one, gradients[one.place]) for one in probed])
    checks = [state.checks.dense(one.name, gradients[one.place], True) for one in sparse]
    jobs = [(one, _submit(state, one, gradients[one.place])) for one in sparse]

    def run() -> torch.Tensor:
        rest_sum: AbstractContextManager[None] = nullcontext()
        if agreed is not None:
            state.await_job(agreed, None)
            # By the reciprocal, before the sum: bit for bit what DDP does without a hook.
            mean = rest.gather(plan).mul_(1.0 / state.size)
            rest_sum = state.dense.under_way(mean, name=plan.rest_name)
        use_dense = []
        with rest_sum:
            for one, job in jobs:
                if state.await_job(job, one.name) == _core.Outcome.USE_DENSE:
                    use_dense.append(one)
        if agreed is not None:
            rest.put_back()
        for one in use_dense:
            dense_fallback(state, gradients[one.place], True, one.name)
        for check in checks:
            if check is not None:
                check.compare(state)
        return buffer

    return run


def _split(state: State, plan: BucketPlan) -> tuple[list[LargeParameter], list[LargeParameter]]:
    """Large parameters that go sparse now, and those in the dense rest whose density is probed."""
    sparse: list[LargeParameter] = []
    probed: list[LargeParameter] = []
    for one in plan.large:
        dense = state.engine.would_be_dense(one.name, one.spec, one.starts_dense)
        (probed if dense else sparse).append(one)
    return sparse, probed


def _range(gradient: torch.Tensor, buffer: torch.Tensor) -> tuple[int, int]:
    """Where a gradient lies in its bucket: [begin, end), in elements."""
    begin = int(gradient.storage_offset() - buffer.storage_offset())
    return begin, begin + gradient.numel()


def _agree(
    state: State, plan: BucketPlan, rest: Rest, probed: list[tuple[LargeParameter, torch.Tensor]]
) -> _core.Job | None:
    """One small round, so that ranks that disagree learn it before they enter the all-reduce."""
    if rest.elems == 0:
        return None
    items = [
        (
            _core.DenseTensor(gradient.data_ptr(), one.spec),
            _core.JobOptions(one.name, _AVG, True, one.starts_dense),
            True,
        )
        for one, gradient in probed
    ]
    spec = _core.TensorSpec(rest.elems, 1, DTYPES[plan.dtype], _core.Layout.DENSE)
    items.append((_core.DenseTensor(0, spec), _core.JobOptions(plan.rest_name, _AVG), False))
    return state.agree(items)


def _submit(state: State, one: LargeParameter, gradient: torch.Tensor) -> _core.Job:
    """A sparse job on a gradient in the bucket, in place."""
    options = _core.JobOptions(one.name, _AVG, True, one.starts_dense)
    return state.submit_dense(_core.DenseTensor(gradient.data_ptr(), one.spec), options)
