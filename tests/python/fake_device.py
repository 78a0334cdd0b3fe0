"""A fake device back end: CPU tensors take the way of devices, over Gloo, and streams and events
only write down who waited for what.

A line of `log` is (thread, stream, what, detail). Operations of torch on the worker's thread are
written down by a dispatch mode, collectives by a wrapper; both with the stream that was current.
"""

from __future__ import annotations

import contextlib
import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zensync import _device, _torch_compat, _worker
from zensync._debug import span

CALLER = "caller"  # the stream of threads that chose none


class Stream:
    def __init__(self, name):
        self.name = name


class Event:
    count = 0

    def __init__(self, stream):
        Event.count += 1
        self.name = f"event {Event.count} on {stream.name}"


class Future(torch.futures.Future):
    """Says when it was completed."""

    def __new__(cls, _):
        return super().__new__(cls)

    def __init__(self, runtime):
        super().__init__()
        self._runtime = runtime

    def set_result(self, result):
        self._runtime.note("complete")
        super().set_result(result)

    def set_exception(self, result):
        self._runtime.note("complete")
        super().set_exception(result)


class FakeRuntime(_device.Runtime):
    """See the top of the file."""

    def __init__(self):
        self.log = []
        self._local = threading.local()
        self._streams = 0

    def note(self, what, detail=None):
        stream = getattr(self._local, "stream", None)
        name = CALLER if stream is None else stream.name
        self.log.append((threading.current_thread().name, name, what, detail))

    def takes(self, device):
        return True

    def problem(self):
        return None

    def stream(self, device):
        self._streams += 1
        return Stream(f"side {self._streams}")

    def current(self, device):
        return getattr(self._local, "stream", None) or Stream(CALLER)

    def record(self, stream):
        event = Event(stream)
        self.note("record", event.name)
        return event

    def wait(self, stream, event):
        self.note("wait", (stream.name, event.name))

    @contextlib.contextmanager
    def using(self, stream):
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def hold(self, tensor, stream):
        assert tensor.layout == torch.strided
        self.note("hold", (stream.name, tensor.data_ptr()))

    def future(self, device):
        return Future(self)

    def synchronise(self, device):
        self.note("synchronise")


class Operations(TorchDispatchMode):
    def __init__(self, runtime):
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_span = str(function).startswith("profiler.")  # on the host alone
        # Gloo's threads inherit the mode.
        if threading.current_thread().name.startswith("zensync-") and not is_span:
            self._runtime.note("operation", str(function))
        return function(*args, **(kwargs or {}))


def install(watches=True):
    """The fake runtime, from now on, in this process. watches: writes down what workers do."""
    runtime = FakeRuntime()
    _device.install(runtime)
    if not watches:
        return runtime
    with Operations(runtime), span("first"):  # in a mode that loads torch's compiler, for seconds
        torch.ones(1)
    runtime.log.clear()
    loop = _worker.Worker._loop

    def watched(worker):
        with Operations(runtime):
            loop(worker)

    _worker.Worker._loop = watched
    for name in ("start_all_reduce", "start_all_to_all", "start_all_gather"):
        _watch(runtime, name)
    return runtime


def _watch(runtime, name):
    real = getattr(_torch_compat, name)

    def watched(*args):
        runtime.note("collective", name)
        return real(*args)

    setattr(_torch_compat, name, watched)


def order_problems(log, caller="MainThread", *, marks=False, torch_waits=False):
    """What is wrong in the order of the events of calls that `caller` made and waited for.
    marks: it also records events for other ends. torch_waits: torch waits for the futures.

    Each call: the caller records an event; the worker's side stream waits for it before it is given
    anything; the worker records the end, completes the future with no operation in between, all
    on the side stream; the caller's stream waits for that end.
    """
    problems, waited, ended = [], set(), None
    asked = [what for thread, _, kind, what in log if thread == caller and kind == "record"]
    open_calls = list(asked)
    for thread, stream, kind, detail in log:
        if thread == caller:
            continue
        if kind in ("operation", "collective"):
            if not stream.startswith("side"):
                problems.append(f"{kind} {detail} on stream {stream}")
            if not waited:
                problems.append(f"{kind} {detail} before the caller's event")
            if ended:
                problems.append(f"{kind} {detail} behind the end of its call")
        elif kind == "wait":
            if detail[0] != stream or detail[1] not in open_calls:
                problems.append(f"the worker waits for {detail}")
            else:
                open_calls.remove(detail[1])
            waited, ended = {detail[1]}, None
        elif kind == "record":
            ended = detail
        elif kind == "complete":
            if ended is None or not stream.startswith("side"):
                problems.append(f"complete on {stream} before the last event")
            elif not torch_waits and not any(
                one == (caller, CALLER, "wait", (CALLER, ended)) for one in log
            ):
                problems.append(f"nobody waits for {ended}")
            waited, ended = set(), None
    return (
        problems
        if marks
        else problems + [f"the side stream never waits for {one}" for one in open_calls]
    )
