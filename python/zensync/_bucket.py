"""What a dense-stored bucket of DDP is made of: parameters that go sparse, and the rest.

Pure bookkeeping over flat positions in the bucket's buffer; nothing here sends.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from . import _core
from ._names import ParameterNames
from ._tensors import spec_of

SMALL_BYTES = 65536  # parameters below stay in the dense rest


@dataclass(frozen=True)
class LargeParameter:
    """A parameter that may go sparse. `place` is its index among the bucket's gradients."""

    place: int
    name: str
    spec: _core.TensorSpec
    starts_dense: bool


@dataclass
class BucketPlan:
    """What stays the same while a bucket has the same parameters, which are kept alive by it."""

    parameters: list[torch.Tensor]
    dtype: torch.dtype
    large: list[LargeParameter] = field(default_factory=list)
    rest_name: str = ""
    title: str = ""  # what traces call it
    scratch: torch.Tensor | None = None  # for a rest that is not contiguous; one step at a time

    @classmethod
    def of(
        cls, parameters: list[torch.Tensor], dtype: torch.dtype, names: ParameterNames
    ) -> BucketPlan:
        plan = cls(parameters, dtype)
        digest = hashlib.sha256()
        for place, parameter in enumerate(parameters):
            name = names.name(parameter)
            digest.update(f"{name}{tuple(parameter.shape)}{dtype};".encode())
            if parameter.is_complex():
                continue  # DDP keeps pairs of reals in the bucket: always in the dense rest
            if not parameter.is_contiguous():
                continue  # nor are, in the bucket, its elements in the order of its rows
            if parameter.numel() * dtype.itemsize >= SMALL_BYTES:
                starts_dense = not names.starts_sparse(parameter)
                spec = spec_of(parameter, dtype)
                plan.large.append(LargeParameter(place, name, spec, starts_dense))
        first, last = names.name(parameters[0]), names.name(parameters[-1])
        count = len(parameters)
        bucket = f"bucket of {count} ({first} … {last})"
        plan.title = first if count == 1 else bucket
        plan.rest_name = f"{bucket} {digest.hexdigest()[:12]}"
        return plan


class BucketPlans:
    """Plans by parameters: DDP makes its buckets anew after the first step."""

    def __init__(self, names: ParameterNames) -> None:
        self.names = names
        self._plans: dict[tuple[object, ...], BucketPlan] = {}

    def get(self, parameters: list[torch.Tensor], dtype: torch.dtype) -> BucketPlan:
        key = (dtype, *map(id, parameters))
        if key not in self._plans:
            self._plans[key] = BucketPlan.of(parameters, dtype, self.names)
        return self._plans[key]


class Rest:
    """The part of a flat buffer outside some ranges, as one contiguous piece.

    `flat` is a view where the part is contiguous already, else a copy: `put_back` writes it.
    """

    def __init__(self, buffer: torch.Tensor, taken: list[tuple[int, int]]) -> None:
        self._pieces: list[torch.Tensor] = []
        at = 0
        for begin, end in [*sorted(taken), (buffer.numel(), buffer.numel())]:
            if begin > at:
                self._pieces.append(buffer[at:begin])
            at = end
        self.elems = sum(piece.numel() for piece in self._pieces)
        self.flat: torch.Tensor | None = None

    def gather(self, plan: BucketPlan) -> torch.Tensor:
        """One contiguous tensor with what the pieces hold now, in memory that `plan` keeps."""
        if len(self._pieces) == 1:
            self.flat = self._pieces[0]
            return self.flat
        if plan.scratch is None or plan.scratch.numel() != self.elems:
            plan.scratch = self._pieces[0].new_empty(self.elems)
        self.flat = torch.cat(self._pieces, out=plan.scratch)
        return self.flat

    def put_back(self) -> None:
        """Writes the gathered tensor to where it came from."""
        if self.flat is None or len(self._pieces) == 1:
            return
        sizes = [piece.numel() for piece in self._pieces]
        for piece, part in zip(self._pieces, self.flat.split(sizes), strict=True):
            piece.copy_(part)
