"""Runs a function in n real processes that form a Gloo group, and gives back what each returned.

Only children that were started here are ended. Time-outs are short: what hangs fails, with the
names of ranks. Ranks are forked from a process that has imported torch and nothing of zensync,
which saves each of them two seconds; those whose end is what is tested are started anew.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 40
SOON_S = 15.0  # bounds on waits, not timings: a hang would be minutes
# A client of a TCPStore, and the server once more, asks for the name of whoever it talks to. A name
# server that leaves such a question open must not cost a test the resolver's usual 5 s.
PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "numpy", "pytest")
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}


class RankError(AssertionError):
    """A rank failed or hung; the text has its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _child(rank, size, folder, init_method, destroy, environment, work):
    os.environ.clear()  # that of a process which was started earlier
    os.environ.update(environment)
    torch.set_num_threads(1)
    result = {"value": None, "error": None}
    try:
        body, args = pickle.loads(work)  # imports zensync, which reads the environment
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        result["value"] = body(rank, size, *args)
        if destroy and dist.is_initialized():
            _end_group()
    except BaseException:
        result["error"] = traceback.format_exc()
    (Path(folder) / f"{rank}.part").write_bytes(pickle.dumps(result))
    os.replace(Path(folder) / f"{rank}.part", Path(folder) / f"{rank}.result")


def _end_group():
    """Ends the group, and with it the threads of Gloo: one may be left with the last reference to a
    tensor or a callback, and the process aborts if it lets go while the interpreter ends. Not while
    anybody refers to the group: a default State under ZENSYNC_DISABLE does until the end.
    """
    from zensync import _default_state, _settings

    if _settings.is_disabled():
        _default_state._defaults.clear()
    gc.collect()
    dist.destroy_process_group()


def run_ranks(
    size, body, *args, timeout_s=150.0, env=None, store="file", exit_codes=True, destroy=True
):
    """[body(rank, size, *args) for each rank], run in `size` processes; RankError if one fails.

    `body` is a function at the top of a test module. exit_codes: whether processes must end with 0.
    destroy: whether the group is destroyed after the body, and the process then ends without the
    interpreter's end.
    """
    context = multiprocessing.get_context("forkserver" if destroy else "spawn")
    if destroy:
        context.set_forkserver_preload([*PRELOADED])
    with tempfile.TemporaryDirectory(prefix="zensync-test-") as folder:
        init_method = f"file://{folder}/store"
        if store == "tcp":
            init_method = f"tcp://127.0.0.1:{free_port()}"
        environment = {**os.environ, **RESOLVER, **(env or {})}
        work = pickle.dumps((body, args))
        children = [
            context.Process(
                target=_child,
                args=(rank, size, folder, init_method, destroy, environment, work),
            )
            for rank in range(size)
        ]
        # Before the start, too: some settings are read by whoever is started.
        with _environment({**RESOLVER, **(env or {})}):
            for child in children:
                child.start()
        until = time.monotonic() + timeout_s
        for child in children:
            child.join(max(until - time.monotonic(), 0.0))
        codes = [child.exitcode for child in children]
        for child in children:
            if child.is_alive():
                child.kill()
                child.join()
        return _collect(Path(folder), codes, exit_codes)


@contextlib.contextmanager
def _environment(env):
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(folder, codes, exit_codes):
    values, problems = [], []
    for rank, code in enumerate(codes):
        path = folder / f"{rank}.result"
        if not path.exists():
            problems.append(f"rank {rank} gave no result (exit code {code}; None: killed, it hung)")
            continue
        result = pickle.loads(path.read_bytes())
        if result["error"]:
            problems.append(f"rank {rank}:\n{result['error']}")
        if exit_codes and code != 0:
            problems.append(f"rank {rank} ended with exit code {code} (None: it hung)")
        values.append(result["value"])
    if problems:
        raise RankError("\n".join(problems))
    return values


def sparse(rank: int, rows: int = 500) -> torch.Tensor:
    """One rank's table, a row in fifty. Sums of it are exact."""
    tensor = torch.zeros(rows, 4)
    tensor[rank::50] = rank + 1
    return tensor


def die() -> None:
    """This rank is killed, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


def same_bits(tensor: torch.Tensor, group=None) -> bool:
    """Whether `tensor` has the same bytes on all ranks of a group."""
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return same_bits(whole.indices(), group) and same_bits(whole.values(), group)
    mine = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return all(other == mine for other in everyone)
