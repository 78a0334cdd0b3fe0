"""What `attach` sends: the gradients of parameters that it took over, in parcels.

A parcel is what is launched at once: one COO gradient, one large dense-stored one (in place), or a
buffer of several small ones. Which parcels there are follows from the order of the parameters and
the forms that their gradients had last, so it is equal on all ranks. A form is the number of sparse
axes: 0 is dense-stored. Nothing here waits but `wait`; used under the lock of `_backward.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ._device import Mark
from ._tensors import dense_of
from ._worker import Pending

ALONE_BYTES = 1 << 20  # dense-stored gradients from here on are sent from where they lie
BUFFER_BYTES = 4 << 20  # of small ones, in one buffer


@dataclass(eq=False)
class Slot:
    """A parameter that was taken over, and what is known of its gradient.

    known: the form of the last synchronisation that all ranks know of; None: nobody had any.
    has_gradient: some backward since the last synchronisation had one. is_final: it is there, and
    the backward that is under way will not add to it. ready: on a device, what the stream had been
    given by then.
    """

    parameter: torch.nn.Parameter
    name: str
    known: int | None = None
    has_gradient: bool = False
    is_final: bool = False
    ready: Mark | None = None
    handle: Any = None  # of the hook; None while the parameter is frozen

    @property
    def form(self) -> int | None:
        """The form of what this rank has to send; None: nothing."""
        gradient = self.parameter.grad
        if gradient is None or not self.has_gradient:
            return None
        return gradient.sparse_dim() if gradient.layout == torch.sparse_coo else 0


Forms = Mapping[Slot, int | None]  # of all ranks together


class Carrier(Protocol):
    """What averages: a State, or the group's own all-reduce."""

    def dense(
        self, parameters: list[torch.Tensor], buffer: torch.Tensor, views: list[torch.Tensor]
    ) -> Pending:
        """Averages `buffer` in place; `views` of it have the parameters' shapes."""

    def coo(self, name: str, tensor: torch.Tensor) -> Pending:
        """Averages a COO tensor; the value is a coalesced one."""


class Parcel:
    """Slots whose gradients travel together; see its two kinds."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self._pending: Pending | None = None

    def is_final(self) -> bool:
        return all(slot.is_final for slot in self.slots)

    def launch(self, carrier: Carrier) -> None:
        """Starts it with what this rank has, which may be nothing."""
        for slot in self.slots:
            if slot.ready is not None:
                slot.ready.wait()
        with torch.no_grad():
            self._pending = self._start(carrier)

    def wait(self) -> Any:
        """The value, once it is there. Raises its error."""
        assert self._pending is not None
        self._pending.wait()
        if self._pending.error is not None:
            raise self._pending.error
        return self._pending.value

    def settle(self) -> None:
        """Waits for its end, whatever it is."""
        if self._pending is not None:
            self._pending.wait()

    def write(self, forms: Forms) -> None:
        """Makes what arrived the gradient, of every slot for which some rank had one."""
        with torch.no_grad():
            self._write(forms)
        self._pending = None

    def _start(self, carrier: Carrier) -> Pending:
        raise NotImplementedError

    def _write(self, forms: Forms) -> None:
        raise NotImplementedError


class CooParcel(Parcel):
    """One COO gradient."""

    def _start(self, carrier: Carrier) -> Pending:
        slot = self.slots[0]
        return carrier.coo(slot.name, _as_coo(slot.parameter, slot.known or 1))

    def _write(self, forms: Forms) -> None:
        slot = self.slots[0]
        form, value = forms[slot], self.wait()
        if form is not None:
            _set_gradient(slot.parameter, value if form else dense_of(value), form)


class DenseParcel(Parcel):
    """One large dense-stored gradient, in place where it can be, or a buffer of small ones."""

    def __init__(self, slots: list[Slot]) -> None:
        super().__init__(slots)
        self._buffer: torch.Tensor | None = None  # kept from step to step
        self._views: list[torch.Tensor] = []
        self._is_in_place = False

    def _start(self, carrier: Carrier) -> Pending:
        parameters = [slot.parameter for slot in self.slots]
        alone = parameters[0].grad if len(parameters) == 1 else None
        self._is_in_place = alone is not None and _is_plain(alone)
        if alone is not None and self._is_in_place:
            whole = alone.detach()
            return carrier.dense([parameters[0]], whole.view(-1), [whole])
        return carrier.dense([*parameters], self._fill(parameters), self._views)

    def _fill(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        shapes = [_real(parameter.detach()).shape for parameter in parameters]
        if self._buffer is None:
            first = _real(parameters[0].detach())
            self._buffer = first.new_empty(sum(shape.numel() for shape in shapes))
            pieces = self._buffer.split([shape.numel() for shape in shapes])
            self._views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        for parameter, view in zip(parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.layout == torch.sparse_coo:
                view.copy_(_real(dense_of(gradient.detach())))
            else:
                view.copy_(_real(gradient.detach()))
        return self._buffer

    def _write(self, forms: Forms) -> None:
        self.wait()
        if self._is_in_place:
            slot = self.slots[0]
            form, gradient = forms[slot], slot.parameter.grad
            if form and gradient is not None:
                slot.parameter.grad = gradient.detach().to_sparse(form)
            return
        for slot, view in zip(self.slots, self._views, strict=True):
            form = forms[slot]
            if form is not None:
                is_complex = slot.parameter.is_complex()
                value = torch.view_as_complex(view) if is_complex else view
                _set_gradient(slot.parameter, value.to_sparse(form) if form else value, form)


def parcels_of(slots: Sequence[Slot]) -> list[Parcel]:
    """Parcels for slots whose form is known, in the order in which they are launched."""
    parcels: list[Parcel] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    for slot in slots:
        bytes_here = slot.parameter.numel() * slot.parameter.element_size()
        if slot.known is None:
            continue
        if slot.known > 0:
            parcels.append(CooParcel([slot]))
        elif bytes_here >= ALONE_BYTES:
            parcels.append(DenseParcel([slot]))
        else:
            kind = (_real(slot.parameter.detach()).dtype, slot.parameter.device)
            group = open_ones.setdefault(kind, [])
            group.append(slot)
            if sum(one.parameter.nbytes for one in group) >= BUFFER_BYTES:
                parcels.append(DenseParcel(group))
                del open_ones[kind]
    parcels.extend(DenseParcel(group) for group in open_ones.values())
    return parcels


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of reals, which is what is sent."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _is_plain(gradient: torch.Tensor) -> bool:
    """Whether it can be averaged where it lies."""
    is_strided = gradient.layout == torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_complex() and not gradient.is_neg()


def _as_coo(parameter: torch.nn.Parameter, sparse_dim: int) -> torch.Tensor:
    """The gradient as a COO tensor with so many sparse axes; none is one without entries."""
    gradient = parameter.grad
    if gradient is None:
        dense_shape = parameter.shape[sparse_dim:]
        return torch.sparse_coo_tensor(
            torch.zeros((sparse_dim, 0), dtype=torch.int64, device=parameter.device),
            parameter.detach().new_zeros((0, *dense_shape)),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    gradient = gradient.detach()
    if gradient.layout == torch.sparse_coo:
        if gradient.sparse_dim() == sparse_dim:
            return gradient
        gradient = dense_of(gradient)
    return gradient.to_sparse(sparse_dim)


def _set_gradient(parameter: torch.nn.Parameter, value: torch.Tensor, form: int) -> None:
    """`value` as the gradient; a dense-stored one that is there keeps its memory."""
    gradient = parameter.grad
    if form or gradient is None or gradient.layout != torch.strided:
        parameter.grad = value if form else torch.empty_like(parameter).copy_(value)
    else:
        gradient.detach().copy_(value)
