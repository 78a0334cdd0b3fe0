"""What `attach` does while backward runs: launches in one order, waits at the end of it.

Hooks of gradients fire in an order that differs between ranks, some not at all. So a parcel is
launched when it and all before it are final, and what is left is launched by a callback at the end
of the backward, empty where this rank has nothing. There all ranks also tell each other which
parameters have gradients at all (docs/adr/0010). Errors are raised by `backward()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import _torch_compat
from ._carrier import PlainCarrier, StateCarrier
from ._debug import span
from ._device import mark_of
from ._join import Joining
from ._parcels import Parcel, Slot, parcels_of
from ._take_over import bytes_of, take_over
from ._worker import Pending, as_error
from .errors import MismatchError, UnsupportedError
from .state import State

Named = list[tuple[str, torch.nn.Parameter]]
Tensors = list[tuple[str, torch.Tensor]]

_REENTRANT = (
    "a second backward began while the first had not ended: re-entrant checkpointing is not "
    "supported, use torch.utils.checkpoint(..., use_reentrant=False); after an exception in "
    "backward, run the module's forward again first"
)


class Attachment:
    """The parameters that a State takes care of, and the backward that is under way.

    find: the parameters that are taken over now, in the order of their registration.
    buffers: the buffers that are.
    """

    def __init__(
        self, state: State, find: Callable[[], Named], buffers: Callable[[], Tensors]
    ) -> None:
        self.state = state
        self.joining = Joining(self)
        self._find, self._buffers = find, buffers
        self._carrier = PlainCarrier(state.group) if state.disabled else StateCarrier(state)
        self._lock = threading.RLock()  # devices have threads of their own in backward
        self._slots: list[Slot] = []  # in the order of launching
        self._digest = ""
        self._parcels: list[Parcel] = []
        self._is_planned = False
        self._unchecked: list[Slot] = []  # taken over later: are their values equal on all ranks?
        self._accumulates = False
        self._backward: int | None = None  # the one that is under way
        self._launched = 0
        self.follow()
        self._unchecked = []

    @property
    def named(self) -> Named:
        """What is taken over, in the order of launching."""
        return [(slot.name, slot.parameter) for slot in self._slots]

    def take_from(self, rank: int) -> None:
        """A collective call: parameters and buffers get the values of `rank`."""
        take_over(self.state, [*self.named, *self._buffers()], rank)

    def follow(self) -> None:
        """Takes over parameters that came or thawed since, and lets go of those that went."""
        found = self._find()
        before = {id(slot.parameter): slot for slot in self._slots}
        if len(found) != len(before) or any(id(one) not in before for _, one in found):
            slots = []
            for name, one in reversed(found):
                slot = before.pop(id(one), None)
                if slot is None:
                    slot = Slot(one, name)
                    self._unchecked.append(slot)
                slots.append(slot)
            for gone in before.values():
                _unhook(gone)
            self._slots, self._is_planned = slots, False
            self._digest = _digest_of(slots)
            self.state.plans.names.learn(found)
        for slot in self._slots:
            if slot.handle is None and slot.parameter.requires_grad:
                hook = _hook_of(weakref.ref(self), slot)
                slot.handle = slot.parameter.register_post_accumulate_grad_hook(hook)

    def unhook(self) -> None:
        """Leaves the parameters alone from now on."""
        for slot in self._slots:
            _unhook(slot)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up locally."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    # ---- called by hooks

    def before_forward(self) -> None:
        """At the module's forward: a backward that was broken off is over."""
        if _torch_compat.backward_id() != -1:
            return
        if not torch.is_grad_enabled():
            self.joining.at_forward(will_synchronise=False)
            return
        with self._lock:
            if self._backward is not None:
                for parcel in self._parcels[: self._launched]:
                    parcel.settle()
                self._end()
            self.follow()
            self.joining.at_forward(will_synchronise=not self._accumulates)

    def arm(self) -> None:
        """In a backward that reached the module: there will be an end of it."""
        with self._lock:
            self.state.require_usable()
            if self._accumulates:
                return
            now = _torch_compat.backward_id()
            if self._backward == now:
                return
            if self._backward is not None:
                with self._telling():
                    raise UnsupportedError(_REENTRANT)
            self.joining.at_backward()
            self._backward = now
            self._plan()
            _torch_compat.at_backward_end(self._finish)

    def gradient_is_final(self, slot: Slot) -> None:
        """The backward that runs will not add to this gradient again."""
        with self._lock:
            slot.has_gradient = True
            if self._accumulates:
                self.state.require_usable()
                _coalesce(slot.parameter)
                return
            self.arm()
            slot.is_final, slot.ready = True, mark_of(slot.parameter.grad)
            while self._launched < len(self._parcels):
                if not self._parcels[self._launched].is_final():
                    return
                self._launch_next()

    # ---- for Join

    def shadow(self) -> None:
        """Takes part in a backward of ranks that are still in Join; they add up what they have, and
        what this rank added up under `no_sync` and did not send. All get the averages."""
        with self._lock:
            self.state.require_usable()
            self.follow()
            for slot in self._slots:
                if not slot.has_gradient:
                    slot.parameter.grad = None  # it was sent already
            self._plan()
            self._finish(is_here=False)

    def start_largest(self, name: str, value: int) -> Pending:
        """Starts a vote: the largest value of all ranks wins."""
        return self._carrier.largest(name, torch.tensor([value], dtype=torch.int32))

    def largest(self, name: str, value: int) -> int:
        """The largest value of all ranks. Raises the error of the vote."""
        return int(_value_of(self.start_largest(name, value)).item())

    # ----

    def _plan(self) -> None:
        if not self._is_planned:
            self._parcels, self._is_planned = parcels_of(self._slots), True

    def _launch_next(self) -> None:
        self._launch(self._parcels[self._launched])
        self._launched += 1

    def _launch(self, parcel: Parcel) -> None:
        """What goes wrong on this rank alone is told to the others, which would wait for it."""
        with self._telling():
            parcel.launch(self._carrier)

    def _finish(self, is_here: bool = True) -> None:
        """The end of a backward: gradients are final when it returns."""
        with span("end of backward"), self._lock:
            try:
                self._synchronise(is_here)
                self.joining.wait()
            finally:
                self._end()
                for slot in self._slots:
                    slot.has_gradient = False

    def _synchronise(self, is_here: bool) -> None:
        while self._launched < len(self._parcels):
            self._launch_next()
        forms, here = self._forms_of_all(self.joining.flags(is_here))
        late = [slot for slot in self._slots if slot.known is None and forms[slot] is not None]
        for slot in late:
            slot.known = forms[slot]
        late_parcels = parcels_of(late)
        for parcel in late_parcels:
            self._launch(parcel)
        for parcel in [*self._parcels, *late_parcels]:
            parcel.wait()
        for parcel in [*self._parcels, *late_parcels]:
            parcel.write(forms)
        if here:
            self._divide_by(here, forms)
        for slot in self._slots:
            if slot.known != forms[slot]:
                slot.known = forms[slot]
                self._is_planned = False
        self._is_planned = self._is_planned and not late

    def _divide_by(self, ranks: int, forms: dict[Slot, int | None]) -> None:
        """Means over all ranks become those over `ranks` of them."""
        with torch.no_grad():
            for slot in self._slots:
                if forms[slot] is not None and slot.parameter.grad is not None:
                    slot.parameter.grad.mul_(self.state.size / ranks)

    def _forms_of_all(self, flags_here: list[int]) -> tuple[dict[Slot, int | None], int]:
        """The form of each gradient where some rank has one: dense-stored if it is on any; and
        how many ranks have set their flag."""
        count = len(self._slots)
        vector = torch.zeros(2 * count + 2, dtype=torch.int32)
        for place, slot in enumerate(self._slots):
            if (form := slot.form) is not None:
                vector[place] = form == 0
                vector[count + place] = form
        known = _digest_of_values(self._unchecked)
        vector[-2], vector[-1] = known, -known
        name = f"which of {count} parameters have gradients ({self._digest})"
        vector = torch.cat([torch.tensor(flags_here, dtype=torch.int32), vector])
        everything = _value_of(self._carrier.largest(name, vector)).tolist()
        here, (*flags, most, least) = (
            everything[: len(flags_here)],
            everything[len(flags_here) :],
        )
        if most != -least:
            raise MismatchError(
                "parameters that were added have different values on the ranks, make them equal: "
                + ", ".join(slot.name for slot in self._unchecked)
            )
        self._unchecked = []
        forms = {
            slot: 0 if flags[place] else (flags[count + place] or None)
            for place, slot in enumerate(self._slots)
        }
        return forms, sum(here)

    def _end(self) -> None:
        self._backward, self._launched = None, 0
        for slot in self._slots:
            slot.is_final, slot.ready = False, None

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as why:
            error = as_error(why, self.state.rank)
            self.state.give_up(error)
            raise error from (None if error is why else why)


def _hook_of(attachment: weakref.ref[Attachment], slot: Slot) -> Callable[[torch.Tensor], None]:
    """A parameter must not keep its State alive."""

    def hook(_: torch.Tensor) -> None:
        if (found := attachment()) is not None:
            found.gradient_is_final(slot)

    return hook


def _unhook(slot: Slot) -> None:
    if slot.handle is not None:
        slot.handle.remove()
        slot.handle = None


def _coalesce(parameter: torch.nn.Parameter) -> None:
    """Duplicates are added up as they come: without it they pile up while accumulating."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout == torch.sparse_coo:
        parameter.grad = gradient.coalesce()


def _digest_of(slots: Iterable[Slot]) -> str:
    digest = hashlib.sha256()
    for slot in slots:
        one = slot.parameter
        digest.update(f"{slot.name}{tuple(one.shape)}{one.dtype};".encode())
    return digest.hexdigest()[:12]


def _digest_of_values(slots: Iterable[Slot]) -> int:
    """31 bits over the bytes of parameters; 0 for none."""
    digest = hashlib.sha256()
    count = 0
    for slot in slots:
        count += 1
        digest.update(bytes_of(slot.parameter.detach()).cpu().numpy().data)
    return int.from_bytes(digest.digest()[:4], "little") >> 1 if count else 0


def _value_of(pending: Pending) -> Any:
    """What a call gives, once it has ended. Raises its error."""
    pending.wait()
    if pending.error is not None:
        raise pending.error
    return pending.value


def tensors_in(output: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in what a module returned: containers, dataclasses and plain objects."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth > 0 and not isinstance(output, str | bytes):
        parts: Iterable[Any] = ()
        if isinstance(output, dict):
            parts = output.values()
        elif isinstance(output, list | tuple | set):
            parts = output
        elif hasattr(output, "__dict__"):
            parts = vars(output).values()
        for part in parts:
            yield from tensors_in(part, depth - 1)
