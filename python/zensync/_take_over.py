"""Ranks compare the parameters that `attach` takes over, and get the values of rank 0.

DDP does neither for parameters that it was told to ignore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from . import _core
from ._dense import MAX
from ._device import runtime, takes
from ._tensors import DTYPES, spec_of
from .errors import MismatchError
from .state import State

Named = Sequence[tuple[str, torch.Tensor]]

_PIECE_BYTES = 64 << 20  # broadcast at a time


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as uint8, in the order of its elements; a copy where they lie otherwise."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def take_over(state: State, named: Named, source: int = 0) -> None:
    """A collective call. Gives all ranks the values of rank `source`, bit for bit, and checks it.
    MismatchError if names, order, shapes or dtypes differ; it names the first that does.
    """
    if state.disabled:
        _take_over_plainly(state, named, source)
        return
    devices = {tensor.device for _, tensor in named if takes(tensor)}
    for device in devices:  # once only, so without streams
        runtime().synchronise(device)
    pending = state.call(lambda: _start(state, named, source), "take over parameters")
    pending.wait()
    if pending.error is not None:
        raise pending.error


def _start(state: State, named: Named, source: int) -> Callable[[], None]:
    """Submits the comparison; what it returns, run on the worker, broadcasts."""
    agreed = state.agree([_item(name, tensor) for name, tensor in named])

    def run() -> None:
        state.await_job(agreed, None)
        with torch.no_grad():
            for name, tensor in named:
                _broadcast(state, name, tensor, source)
            for device in {tensor.device for _, tensor in named if takes(tensor)}:
                runtime().synchronise(device)
            _check(state, named, source)

    return run


def _item(name: str, tensor: torch.Tensor) -> tuple[_core.DenseTensor, _core.JobOptions, bool]:
    shape = ",".join(str(length) for length in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    where = f" on {tensor.device.type}" if takes(tensor) else ""
    key = f"{name} ({dtype}[{shape}]{where})"
    known = tensor.dtype in DTYPES
    spec = spec_of(tensor, None if known else torch.int32)
    return _core.DenseTensor(0, spec), _core.JobOptions(key, _core.ReduceOp.SUM), False


def _broadcast(state: State, name: str, tensor: torch.Tensor, source: int) -> None:
    """By a sum of bytes, to which only rank `source` adds others than zeros: exact."""
    whole = bytes_of(tensor.detach())
    for piece in whole.split(_PIECE_BYTES):
        if state.rank != source:
            piece.zero_()
        state.groups.of(tensor.device).all_reduce(piece, name=name)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(whole.view(tensor.dtype).view(tensor.shape))


def _check(state: State, named: Named, source: int) -> None:
    digests = torch.tensor([digest_of(tensor) for _, tensor in named], dtype=torch.int32)
    both = torch.cat([digests, -digests])
    state.dense.all_reduce(both, MAX, "digests of parameters")
    most, least = both[: len(digests)], -both[len(digests) :]
    for (name, _), differs in zip(named, (most != least).tolist(), strict=True):
        if differs:
            text = f"{name} has other values than on rank {source} after the broadcast"
            raise MismatchError(text)


def digest_of(tensor: torch.Tensor) -> int:
    """31 bits over the bytes of a tensor."""
    digest = hashlib.sha256(bytes_of(tensor.detach()).cpu().numpy().data)
    return int.from_bytes(digest.digest()[:4], "little") >> 1


def _take_over_plainly(state: State, named: Named, source: int) -> None:
    """With the group's own collectives."""
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    everyone: list[list[tuple[str, tuple[int, ...], str]]] = [[] for _ in range(state.size)]
    dist.all_gather_object(everyone, mine, group=state.group)
    for rank, theirs in enumerate(everyone):
        for entry, other in zip(everyone[0], theirs, strict=False):
            if entry != other:
                raise MismatchError(f"rank 0 has parameter {entry}, rank {rank} has {other}")
        if len(theirs) != len(everyone[0]):
            raise MismatchError(f"rank {rank} has {len(theirs)} parameters, 0 {len(everyone[0])}")
    for _, tensor in named:
        dist.broadcast(tensor.detach(), group_src=source, group=state.group)
