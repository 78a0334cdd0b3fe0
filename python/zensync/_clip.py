"""`zensync.clip_grad_norm_`: clipping by the total norm, also of COO gradients.

Torch's own fails on those (2.13). Local: after `backward()` gradients are equal on all ranks, so
norms are too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import _torch_compat
from .errors import Error, UnsupportedError


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients, in place, so that their total norm is at most `max_norm`; the norm before.

    As `torch.nn.utils.clip_grad_norm_`. A COO gradient counts as the dense one it stands for, so
    it is coalesced first. Error: a norm of NaN or infinity, if `error_if_nonfinite`.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    values = [_values_of(one) for one in parameters if one.grad is not None]
    if not values:
        return torch.tensor(0.0)
    first = values[0].device
    norms = [torch.linalg.vector_norm(one, norm_type).to(first) for one in values if one.numel()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise Error(f"the total norm of order {norm_type} of the gradients is {float(total)}")
    # As torch does it: no branch, so that a device need not be waited for.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for one in values:
        one.mul_(scale.to(one.device))
    return total


def _values_of(parameter: torch.Tensor) -> torch.Tensor:
    """What a gradient holds, as a strided tensor that shares its memory."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout == torch.strided:
        return gradient.detach()
    if gradient.layout != torch.sparse_coo:
        raise UnsupportedError(f"a gradient is {gradient.layout}; use dense-stored or COO ones")
    if not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return _torch_compat.coo_values(gradient).detach()
