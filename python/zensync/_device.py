"""Streams of devices: which tensors take the way of `torch_path.py`, and what waits for what there.

A State has a side stream for each device (`Lane`). Everything its worker does for one call runs on
it, behind an event recorded on the caller's stream when the call was made (`Passage`); whoever
waits for the call makes its own current stream wait for its end. Memory is marked as used by each
stream that uses it. `Runtime` is all that is known of devices: torch's own interface to whatever
accelerator there is, for which tests install another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from . import _torch_compat
from .errors import UnsupportedError


class Runtime:
    """Devices as torch knows them. Streams and events are torch's."""

    def takes(self, device: torch.device) -> bool:
        """Whether tensors on `device` take the way of `torch_path.py`."""
        return device.type != "cpu"

    def problem(self) -> str | None:
        """Why this torch cannot be used for devices; None if it can."""
        if hasattr(torch, "accelerator") and hasattr(torch, "Event"):
            return None
        return f"torch {torch.__version__} has no torch.accelerator; 2.6 and later have"

    def stream(self, device: torch.device) -> Any:
        """A new stream."""
        return torch.Stream(device=device)

    def current(self, device: torch.device) -> Any:
        """The stream that this thread uses."""
        return torch.accelerator.current_stream(device)

    def record(self, stream: Any) -> Any:
        """An event behind all that was given to `stream` so far."""
        event = torch.Event(device=stream.device)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """What is given to `stream` from now on waits for `event`."""
        stream.wait_event(event)

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """This thread uses `stream` meanwhile."""
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """The memory of a strided tensor is not used again before `stream` has come so far."""
        tensor.record_stream(stream)

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        """One whose waits make the current stream wait."""
        return torch.futures.Future(devices=[device])

    def synchronise(self, device: torch.device) -> None:
        """Waits until the device has done all that it was given."""
        torch.accelerator.synchronize(device)


_runtime: list[Runtime] = [Runtime()]


def runtime() -> Runtime:
    """What is known of devices."""
    return _runtime[0]


def install(other: Runtime) -> None:
    """Puts another in place of it, before any State is made; for tests."""
    _runtime[0] = other


def takes(tensor: torch.Tensor) -> bool:
    """Whether `tensor` takes the way of `torch_path.py`."""
    return runtime().takes(tensor.device)


def future_of(tensor: torch.Tensor) -> torch.futures.Future[Any]:
    """A future that may be completed with `tensor`."""
    return runtime().future(tensor.device) if takes(tensor) else torch.futures.Future()


def require_device(device: torch.device, group: dist.ProcessGroup) -> None:
    """UnsupportedError unless tensors on `device` can be summed over `group`."""
    if device.type == "cpu":
        return
    known = _torch_compat.device_types(group)
    if device.type not in known:
        have = ", ".join(f"{name} for {kind}" for kind, name in known.items()) or "none"
        raise UnsupportedError(
            f"the process group has no backend for tensors on {device.type} (it has {have}); make "
            "it with one, as in init_process_group('cpu:gloo,cuda:nccl')"
        )
    if (problem := runtime().problem()) is not None:
        raise UnsupportedError(f"tensors on {device} are not supported here: {problem}")


class Mark:
    """What the current stream of a device had been given when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = runtime().record(runtime().current(device))

    def wait(self) -> None:
        """The current stream of this thread waits for it."""
        runtime().wait(runtime().current(self._device), self._event)


def mark_of(tensor: torch.Tensor | None) -> Mark | None:
    """A mark on the device of a tensor that takes the way of devices; else None."""
    return Mark(tensor.device) if tensor is not None and takes(tensor) else None


class Lane:
    """The side stream of one State on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = runtime().stream(device)


class Passage:
    """One call on a lane, made on the caller's thread; the rest is the worker's, but `join`."""

    def __init__(self, lane: Lane, tensors: tuple[torch.Tensor, ...]) -> None:
        self._lane = lane
        self._asked = runtime().record(runtime().current(lane.device))
        self._ended: Any = None
        self.future = runtime().future(lane.device)
        for tensor in tensors:
            self._hold(tensor, lane.stream)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The side stream is current, and behind what the caller's stream had been given."""
        with runtime().using(self._lane.stream):
            runtime().wait(self._lane.stream, self._asked)
            yield

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The side stream is current; the end of the call is what it has been given so far."""
        with runtime().using(self._lane.stream):
            self._ended = runtime().record(self._lane.stream)
            yield

    def join(self, value: Any) -> None:
        """The current stream of this thread waits for the end, and may then use `value`."""
        stream = runtime().current(self._lane.device)
        runtime().wait(stream, self._ended)
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor, stream)

    def _hold(self, tensor: torch.Tensor, stream: Any) -> None:
        for one in parts_of(tensor):
            if one.device == self._lane.device:
                runtime().hold(one, stream)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a tensor consists of."""
    if tensor.layout != torch.sparse_coo:
        return [tensor.detach()]
    plain = tensor.detach()
    return [_torch_compat.coo_indices(plain), _torch_compat.coo_values(plain)]
