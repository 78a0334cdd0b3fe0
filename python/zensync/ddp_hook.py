"""`zensync.hook`, for `ddp.register_comm_hook(state, zensync.hook)`: averages, as DDP does.

Every parameter is looked at by itself: large ones that are mostly zeros are sent sparse, in place
in the bucket; the rest of the bucket goes through the State's dense all-reduce (`_dense.py`) in one
piece. Never raises: the future ends with the error.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from . import _core, _plain
from ._bucket import BucketPlan, LargeParameter, Rest
from ._tensors import DTYPES, CooParts, require_supported
from ._worker import Pending, as_error
from .errors import UnsupportedError
from .reduce import dense_fallback, submit_coo
from .state import State

_AVG = _core.ReduceOp.AVG


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks of `state`.

    Dense-stored buckets: the future gives the buffer, averaged in place. Buckets of one
    `sparse=True` table: a coalesced COO tensor. On an error the future has it, DDP raises a
    RuntimeError that contains its text, and `state.last_error` is the object.
    """
    try:
        state.require_usable()
        if state.disabled:
            return _plain.hook(state.group, bucket)
        buffer = bucket.buffer()
        require_supported(buffer)
        if buffer.layout == torch.sparse_coo:
            return _sparse_bucket(state, bucket.parameters()[0], buffer)
        return _dense_bucket(state, bucket, buffer)
    except Exception as why:  # DDP cannot go on after a hook that raises
        return _failed(state, why)


def _failed(state: State, why: Exception) -> torch.futures.Future[torch.Tensor]:
    error = as_error(why, state.rank)
    if isinstance(error, UnsupportedError):
        state.note_failure(error)  # nothing was sent, on any rank alike
    else:
        state.give_up(error)
    pending = Pending(lambda: None)
    pending.end(None, error)
    return pending.future


def _sparse_bucket(
    state: State, parameter: torch.Tensor, buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """A `sparse=True` table: an uncoalesced COO gradient, alone in its bucket."""
    state.require_coo()
    options = _core.JobOptions(state.plans.names.name(parameter), _AVG)
    parts = CooParts.of(buffer.detach())
    return state.call(lambda: submit_coo(state, parts, options)).future


def _dense_bucket(
    state: State, bucket: dist.GradBucket, buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    plan = state.plans.get(bucket.parameters(), buffer.dtype)
    gradients = bucket.gradients() if plan.large else []
    return state.call(lambda: _start(state, plan, buffer, gradients)).future


def _start(
    state: State, plan: BucketPlan, buffer: torch.Tensor, gradients: list[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Submits a bucket's jobs; what it returns, run on the worker, gives the averaged buffer."""
    sparse, probed = _split(state, plan)
    rest = Rest(buffer, [_range(gradients[one.place], buffer) for one in sparse])
    agreed = _agree(state, plan, rest, [(one, gradients[one.place]) for one in probed])
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
