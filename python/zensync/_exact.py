"""Adding and rounding in operations of torch whose results no device may choose: bits are those of
the core's kernels. What a NaN becomes is said in integers.
"""

from __future__ import annotations

import torch

from ._tensors import HALVES

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as integers, by size
_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
# What x86 makes of Inf - Inf; other processors give other NaNs.
_NO_NUMBER = {torch.float32: -(1 << 22), torch.float64: -(1 << 51)}


def _quiet(value: torch.Tensor) -> torch.Tensor:
    """The same NaNs, quiet."""
    bits = value.view(BITS[value.dtype.itemsize])
    return (bits | (1 << (_MANTISSA[value.dtype] - 1))).view(value.dtype)


def add(sums: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """sums[at] += values, `at` distinct; of two NaNs that of `sums` stays, made quiet."""
    old, values = sums[at], widen(values)
    new = old + values
    if new.is_floating_point():
        none = torch.full_like(new, _NO_NUMBER[new.dtype], dtype=BITS[new.dtype.itemsize])
        new = torch.where(new.isnan(), none.view(new.dtype), new)
        new = torch.where(values.isnan(), _quiet(values), new)
        new = torch.where(old.isnan(), _quiet(old), new)
    sums.index_copy_(0, at, new)


def widen(values: torch.Tensor) -> torch.Tensor:
    """16-bit floats as fp32, exactly; a NaN keeps its payload."""
    if values.dtype not in HALVES:
        return values
    bits = values.view(torch.int16).int()
    if values.dtype == torch.bfloat16:
        return (bits << 16).view(torch.float32)
    nan = (bits & -0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13
    return torch.where(values.isnan(), nan.view(torch.float32), values.float())


def finish(sums: torch.Tensor, dtype: torch.dtype, divisor: int) -> torch.Tensor:
    """The sums divided once, and rounded once to `dtype`."""
    if divisor != 1:
        # By a tensor: torch turns a plain number into a product with its inverse on some devices.
        quotient = sums / torch.full_like(sums[:1], divisor)
        sums = torch.where(sums.isnan(), sums, quotient)
    if dtype == sums.dtype:
        return sums
    bits = sums.view(torch.int32)
    shift = _MANTISSA[torch.float32] - _MANTISSA[dtype]
    top = bits >> 16
    nan = (top & -0x8000) | _EXPONENT[dtype] | (1 << (_MANTISSA[dtype] - 1))
    nan = nan | ((bits >> shift) & ((1 << _MANTISSA[dtype]) - 1))
    return torch.where(sums.isnan(), nan.to(torch.int16).view(dtype), sums.to(dtype))


def zeros(rows: int, like: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if like.dtype in HALVES else like.dtype
    return torch.zeros((rows, like.shape[1]), dtype=dtype, device=like.device)
