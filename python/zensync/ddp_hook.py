"""`zensync.hook`, for `ddp.register_comm_hook(state, zensync.hook)`: averages, as DDP does.

Every parameter is looked at by itself: large ones that are mostly zeros are sent sparse, in place
in the bucket; the rest of the bucket goes through the State's dense all-reduce in one piece
(`_dense_bucket.py`). Never raises: the future ends with the error.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
import torch
import torch.distributed as dist

from . import _plain
from ._dense_bucket import call_bucket
from ._tensors import require_supported
from ._worker import Pending, as_error
from .errors import UnsupportedError
from .reduce import call_coo
from .state import State


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
    return call_coo(state, buffer.detach(), state.plans.names.name(parameter), True).future


def _dense_bucket(
    state: State, bucket: dist.GradBucket, buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    plan = state.plans.get(bucket.parameters(), buffer.dtype)
    gradients = bucket.gradients() if plan.large else []
    return call_bucket(state, plan, buffer, gradients).future
