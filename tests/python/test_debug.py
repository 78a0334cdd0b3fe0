"""What is seen from outside: ZENSYNC_DEBUG and its two companions, spans in torch's profiler."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import zensync
from ranks import run_ranks, sparse
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from zensync._attach import _attached


def body(rank, size):
    with zensync.State(deadline_s=20) as state:
        for _ in range(2):
            zensync.all_reduce(sparse(rank), name="a table", state=state)


def lines_of(tmp_path, size=2, **variables):
    """Lines by rank, of files named by ZENSYNC_DEBUG_FILE."""
    variables = {f"ZENSYNC_DEBUG{name}": value for name, value in variables.items()}
    run_ranks(size, body, env={**variables, "ZENSYNC_DEBUG_FILE": str(tmp_path / "%h.%p")})
    files = sorted(tmp_path.iterdir())
    start = f"{socket.gethostname()}."
    assert all(file.name.startswith(start) for file in files)
    texts = [file.read_text().splitlines() for file in files]
    for file, lines in zip(files, texts, strict=True):
        pid = file.name.removeprefix(start)
        assert all(line.startswith(f"{socket.gethostname()}:{pid} zensync ") for line in lines)
    return [[line.partition(" zensync ")[2] for line in lines] for lines in texts if lines]


def test_info_says_what_is_active_and_what_was_chosen(tmp_path):
    found = lines_of(tmp_path, **{"": "info"})
    assert len(found) == 2
    for lines in found:
        assert any(line == f"INFO INIT version {zensync.__version__}" for line in lines)
        assert "INFO ENV ZENSYNC_DEBUG=info" in lines
        assert any("INFO INIT rank" in line and "native transport" in line for line in lines)
        chosen = [line for line in lines if line.startswith("INFO TUNING")]
        assert any('"a table": ' in line and "units of" in line for line in chosen)
        assert not any("TRACE" in line for line in lines)


def test_trace_has_a_line_for_each_call(tmp_path):
    for lines in lines_of(tmp_path, **{"": "TRACE"}):
        calls = [line for line in lines if line.startswith("TRACE COLL")]
        assert len(calls) == 2
        assert re.search("[1-9][0-9]* units here, [1-9][0-9]* in the union", calls[0])
        assert "bytes sent" in calls[0]


@pytest.mark.parametrize(
    ("subsystems", "there", "gone"),
    [("INIT", "INIT", "TUNING"), ("^init,env", "TUNING", "INIT"), ("ALL", "ENV", "nothing")],
)
def test_subsystems_are_chosen_or_left_out(tmp_path, subsystems, there, gone):
    for lines in lines_of(tmp_path, **{"": "INFO", "_SUBSYS": subsystems}):
        assert any(f"INFO {there} " in line for line in lines)
        assert not any(f"INFO {gone} " in line for line in lines)


def test_without_it_nothing_is_said(tmp_path):
    assert lines_of(tmp_path) == []


def test_version_says_only_that(tmp_path):
    for lines in lines_of(tmp_path, **{"": "VERSION"}):
        assert lines == [f"INFO INIT version {zensync.__version__}"]


def run_python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_warnings_go_to_stderr_once_although_the_program_logs_too():
    code = (
        "import logging, zensync; logging.basicConfig(level=logging.INFO)\n"
        "logging.getLogger('zensync.net').warning('zensync: a warning')\n"
        "logging.getLogger('zensync.net').info('nothing')"
    )
    done = run_python(code, ZENSYNC_DEBUG="WARN")
    assert done.stdout == ""
    assert done.stderr.count("a warning") == 1
    assert "zensync WARN NET a warning" in done.stderr
    assert "nothing" not in done.stderr


def test_a_file_that_cannot_be_opened_is_a_warning():
    done = run_python(
        "import zensync", ZENSYNC_DEBUG="INFO", ZENSYNC_DEBUG_FILE="/no/such/folder/f"
    )
    assert done.returncode == 0
    assert "ZENSYNC_DEBUG_FILE cannot be opened" in done.stderr


def body_refused(rank, size):
    with pytest.raises(zensync.Error) as why:
        zensync.State()
    return str(why.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ZENSYNC_DEBUG", "LOUD", "it must be VERSION, WARN, INFO, TRACE"),
        ("ZENSYNC_DEBUG_SUBSYS", "INIT,P2P", "ZENSYNC_DEBUG_SUBSYS has P2P; known are"),
    ],
)
def test_what_is_not_understood_is_refused(name, value, words):
    assert words in run_ranks(1, body_refused, env={name: value})[0]
    done = run_python("import zensync.cli; zensync.cli.main()", **{name: value})
    assert done.returncode == 2


# ---- spans


def spans_of(trace, name):
    """(begin, end, thread) in µs, of events whose name begins with `name`."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [
        (event["ts"], event["ts"] + event["dur"], event["tid"])
        for event in events
        if event.get("ph") == "X" and event["name"].startswith(name)
    ]


class Wait(torch.autograd.Function):
    """Its backward goes on once the first exchange of this backward has ended."""

    model = None

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        parcel = _attached[Wait.model]._parcels[0] if Wait.model else None
        if parcel is not None:
            assert parcel._pending.wait(20.0), "the exchange waits for the end of backward"
        return gradient


def body_spans(rank, size, folder):
    torch.manual_seed(0)
    lower, upper = (torch.nn.Linear(512, 512, bias=False) for _ in range(2))
    model = torch.nn.Sequential(lower, upper)
    model.forward = lambda inputs: upper(Wait.apply(lower(inputs)))
    state = zensync.attach(model, deadline_s=30)
    inputs = torch.randn(64, 512)
    model(inputs).sum().backward()  # the first backward does not overlap
    model.zero_grad()
    Wait.model = model
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        model(inputs).sum().backward()
    state.close()
    path = f"{folder}/{rank}.json"
    profiler.export_chrome_trace(path)
    return path


def test_a_trace_shows_an_exchange_during_backward_of_the_layers_below(tmp_path):
    for path in run_ranks(2, body_spans, str(tmp_path)):
        trace = tmp_path / os.path.basename(path)
        (sync,) = spans_of(trace, "zensync::sync 1.weight")
        (end,) = spans_of(trace, "zensync::end of backward")
        upper, lower = spans_of(trace, "autograd::engine::evaluate_function: MmBackward")
        assert sync[2] != end[2], "the worker has a thread of its own"
        assert upper[0] < sync[0] < sync[1] < lower[0] < end[0]
        assert len(spans_of(trace, "zensync::launch")) == 3
