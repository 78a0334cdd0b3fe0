"""The same calls with ZENSYNC_DISABLE=1: the group's own all-reduce, and no mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import _torch_compat
from ._device import future_of
from ._tensors import HALVES
from ._worker import Pending, as_error

if TYPE_CHECKING:
    from .reduce import Work


def all_reduce(
    tensor: torch.Tensor, average: bool, group: dist.ProcessGroup, async_op: bool
) -> Work | None:
    """As `zensync.all_reduce`, but has ended when it returns, whatever `async_op` says."""
    from .reduce import Work

    is_coo = tensor.layout == torch.sparse_coo
    with torch.no_grad():
        if is_coo:  # Gloo does not add 16-bit floats of COO tensors
            whole = tensor.float() if tensor.dtype in HALVES else tensor
        else:
            whole = tensor.detach().resolve_neg().contiguous()
        dist.all_reduce(whole, group=group)
        if average:
            whole.div_(dist.get_world_size(group))
        if is_coo and whole is not tensor:
            tensor.copy_(whole.to(tensor.dtype))
        elif not is_coo and whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
    if not async_op:
        return None
    pending = Pending(lambda: None)
    pending.future = future_of(tensor)
    pending.end([tensor], None)
    return Work(pending, tensor)


def reduce_scatter(
    own: torch.Tensor, parts: list[torch.Tensor], average: bool, group: dist.ProcessGroup
) -> None:
    """The sum over the group of one of `parts` each (one per rank, of one shape), into `own`.

    own: this rank's, of that shape or with fewer rows. The group's own reduce-scatter.
    """
    whole = torch.empty_like(parts[0])
    dist.reduce_scatter(whole, parts, group=group)
    if average:
        whole.div_(dist.get_world_size(group))
    own.copy_(whole[: len(own)])


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The parts of all ranks, which have one shape; the group's own all-gather."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return parts


def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """As DDP without a hook: divided by the number of ranks, then summed; has ended at return.

    No callback on Gloo's future: it would run Python on a thread of Gloo, which aborts the process
    if that happens while the interpreter ends.
    """
    try:
        return _finished(average(group, bucket.buffer()))
    except RuntimeError as why:
        failed = Pending(lambda: None)
        failed.end(None, as_error(why))
        return failed.future


def average(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks: `tensor` itself where it is dense-stored, as DDP does it."""
    size = dist.get_world_size(group)
    if tensor.layout != torch.sparse_coo:
        tensor.mul_(1.0 / size)
        dist.all_reduce(tensor, group=group)
        return tensor
    wide = tensor.float() if tensor.dtype in HALVES else tensor  # Gloo does not add those of COO
    dist.all_reduce(wide, group=group)
    return (wide / size).to(tensor.dtype)


def largest(group: dist.ProcessGroup, vector: torch.Tensor) -> torch.Tensor:
    """The largest entries over the ranks, of a CPU tensor."""
    known = _torch_compat.device_types(group)
    there = vector if "cpu" in known else vector.to(next(iter(known), "cpu"))
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    return there.cpu()


def _finished(value: torch.Tensor) -> torch.futures.Future[Any]:
    future = future_of(value)
    future.set_result(value)
    return future
