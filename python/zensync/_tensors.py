"""Tensors of torch as the core takes them: what is supported, rows, pointers, COO parts.

Nothing here sends anything; UnsupportedError comes from here, before a job exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from . import _core, _torch_compat
from .errors import Error, UnsupportedError

DTYPES: dict[torch.dtype, _core.DType] = {
    torch.float32: _core.DType.F32,
    torch.float64: _core.DType.F64,
    torch.bfloat16: _core.DType.BF16,
    torch.float16: _core.DType.F16,
    torch.int32: _core.DType.I32,
    torch.int64: _core.DType.I64,
}

HALVES = (torch.float16, torch.bfloat16)  # added up as fp32, rounded once

_LAYOUT_WORDS = {
    torch.sparse_csr: "CSR",
    torch.sparse_csc: "CSC",
    torch.sparse_bsr: "BSR",
    torch.sparse_bsc: "BSC",
}


def require_supported(tensor: torch.Tensor) -> None:
    """UnsupportedError, with words on what to do, unless zensync can sum `tensor`; whether the
    group can send it is for `_device.require_device`."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.is_nested:
        raise UnsupportedError("nested tensors are not supported; sum their parts one by one")
    if _torch_compat.has_own_dispatch(tensor):
        raise UnsupportedError(
            f"{type(tensor).__name__} is not supported: it may hold no memory of its own; sum the "
            "plain tensors in it"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError("a lazy parameter has no values yet; run the module once")
    if tensor.is_quantized:
        raise UnsupportedError("quantised tensors are not supported; call dequantize() first")
    if tensor.layout in _LAYOUT_WORDS:
        word = _LAYOUT_WORDS[tensor.layout]
        raise UnsupportedError(f"{word} tensors are not supported; call to_sparse_coo() first")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise UnsupportedError(f"{tensor.layout} is not supported; use a dense or COO tensor")
    if tensor.is_meta:
        raise UnsupportedError("meta tensors hold no values to sum")
    if tensor.is_complex():
        raise UnsupportedError("complex tensors are not supported; sum torch.view_as_real(tensor)")
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UnsupportedError(
            f"dtype {tensor.dtype} is not supported; use one of {known} (tensor.to(…))"
        )
    if tensor.layout == torch.strided and _overlaps_itself(tensor):
        raise UnsupportedError(
            "elements of this tensor may share memory (expand, as_strided), which leaves no place "
            "for a sum; call contiguous() first"
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may mean one element: a stride does not reach over the axes below it."""
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 0:
            return False
        if length > 1 and stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def spec_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> _core.TensorSpec:
    """Shape of a dense-stored tensor as rows × row_elems.

    [V, D…] has V rows; scalars and vectors have one element a row; empty tensors have no rows.
    `dtype`: in place of the tensor's own.
    """
    if tensor.numel() == 0:
        rows, row_elems = 0, 1
    elif tensor.dim() < 2:
        rows, row_elems = tensor.numel(), 1
    else:
        rows, row_elems = tensor.shape[0], tensor.numel() // tensor.shape[0]
    return _core.TensorSpec(rows, row_elems, DTYPES[dtype or tensor.dtype], _core.Layout.DENSE)


def plain_name(tensor: torch.Tensor) -> str:
    """The name of a tensor that was given none: dtype, shape and layout."""
    shape = ",".join(str(length) for length in tensor.shape)
    layout = "coo" if tensor.layout == torch.sparse_coo else "dense"
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}] {layout}"


def mode_of(tensor: torch.Tensor) -> Any:
    """Inference tensors may be written in inference mode only; it is a thread's own."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


def sorted_ids(rows: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Row ids, ascending and distinct, int64, on `device`. Error if one is not in [0, count)."""
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.int64:
        raise Error("rows= must be an int64 tensor of row ids")
    if rows.device.type != "cpu" and rows.device != device:
        raise UnsupportedError(
            f"rows= on {rows.device} is not supported for a tensor on {device}; use a CPU tensor"
        )
    ids = torch.unique(rows.detach().reshape(-1), sorted=True)  # where they are
    if ids.numel() and (int(ids[0]) < 0 or int(ids[-1]) >= count):
        raise Error(f"rows= has ids outside [0, {count})")
    return ids.to(device).contiguous()


@dataclass(frozen=True)
class CooParts:
    """A COO tensor with its sparse axes joined into one.

    indices int64[entries], values [entries, *dense shape], both contiguous; `shape` is the
    tensor's.
    """

    indices: torch.Tensor
    values: torch.Tensor
    shape: torch.Size
    sparse_dim: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> CooParts:
        """Parts of a COO tensor; copies only what is not contiguous or has several sparse axes."""
        shape, sparse_dim = tensor.shape, tensor.sparse_dim()
        if math.prod(shape[:sparse_dim]) >= 2**63:
            raise UnsupportedError("the sparse axes have 2^63 positions or more; use fewer")
        all_indices = _torch_compat.coo_indices(tensor)
        if sparse_dim == 1:
            joined = all_indices[0]
        else:
            joined = all_indices.new_zeros(all_indices.shape[1])
            outside = torch.zeros_like(joined, dtype=torch.bool)
            for axis in range(sparse_dim):
                joined = joined * shape[axis] + all_indices[axis]
                outside |= (all_indices[axis] < 0) | (all_indices[axis] >= shape[axis])
            joined.masked_fill_(outside, -1)  # the core refuses it, and tells all ranks
        values = _torch_compat.coo_values(tensor).detach().contiguous()
        return cls(joined.contiguous(), values, shape, sparse_dim)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: self.sparse_dim])

    @property
    def row_elems(self) -> int:
        return math.prod(self.shape[self.sparse_dim :])

    @property
    def spec(self) -> _core.TensorSpec:
        """Its shape, for the core."""
        rows = self.rows if self.row_elems else 0
        dtype = DTYPES[self.values.dtype]
        return _core.TensorSpec(rows, max(self.row_elems, 1), dtype, _core.Layout.COO)

    def core_tensor(self) -> _core.CooTensor:
        """What the engine takes; this object must live until the job has ended."""
        entries = self.indices.numel() if self.row_elems else 0
        return _core.CooTensor(self.indices.data_ptr(), self.values.data_ptr(), entries, self.spec)

    def fetch(self, job: _core.Job) -> torch.Tensor:
        """The result of a job that is done: a coalesced COO tensor of the same shape and dtype."""
        entries = job.result_entries
        indices = torch.empty(entries, dtype=torch.int64)
        values = torch.empty((entries, *self.shape[self.sparse_dim :]), dtype=self.values.dtype)
        job.copy_result(indices.data_ptr(), values.data_ptr())
        return self.assemble(indices, values)

    def assemble(self, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A coalesced COO tensor of this shape from ascending rows and their values."""
        split = []
        for axis in reversed(range(self.sparse_dim)):
            split.append(rows % self.shape[axis] if axis else rows)
            rows = torch.div(rows, self.shape[axis], rounding_mode="floor") if axis else rows
        indices = torch.stack(split[::-1]) if split else rows.new_empty((0, len(values)))
        return torch.sparse_coo_tensor(
            indices, values, self.shape, is_coalesced=True, check_invariants=False
        )

    def dense(self) -> torch.Tensor:
        """[rows, row_elems], duplicates added up; 16-bit floats as fp32."""
        dtype = torch.float32 if self.values.dtype in HALVES else self.values.dtype
        result = self.values.new_zeros((self.rows, self.row_elems), dtype=dtype)
        values = self.values.reshape(self.indices.numel(), self.row_elems).to(dtype)
        return result.index_add_(0, self.indices, values)

    def member(self) -> torch.Tensor:
        """uint8 [rows]: 1 where this tensor has an entry, whatever its value."""
        member = torch.zeros(self.rows, dtype=torch.uint8, device=self.indices.device)
        member[self.indices] = 1
        return member

    def from_dense(self, dense: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
        """The reverse of `dense`, with the rows where `member` [rows] is not 0."""
        rows = member.nonzero().reshape(-1)
        values = dense[rows].to(self.values.dtype)
        return self.assemble(rows, values.reshape(len(rows), *self.shape[self.sparse_dim :]))


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    """A COO tensor as a dense-stored one, duplicates added up.

    Not `to_dense`, which gives zeros (torch 2.13) where values are expanded, as the gradient of a
    table with one column is when a single row of it was used.
    """
    whole = CooParts.of(tensor).dense()
    return whole.reshape(tensor.shape).to(tensor.dtype)
