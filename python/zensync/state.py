"""A State: what one group of ranks synchronises with; its own mesh, engine and worker.

States never wait for each other. Making one is a collective call. All calls on one State are made
in the same order on all ranks; its jobs run in that order. Every future ends; after an error that
ranks share, the State refuses jobs until it is made anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _exit
from ._bucket import BucketPlans
from ._mesh import open_mesh
from ._names import ParameterNames
from ._torch_compat import group_is_alive
from ._worker import Pending, Worker
from .errors import Error, PeerLostError, UnsupportedError, raise_error

_ABORT_SHARE = 0.6  # of a bound on close: for jobs to end by themselves
_LONG_S = 3600.0


def is_disabled() -> bool:
    """Whether ZENSYNC_DISABLE=1: the same calls, but the group's plain all-reduce and no mesh."""
    return bool(_core.environment()["disable"])


class State:
    """Synchronises tensors of the ranks of `process_group` (the default group if None).

    module: names its parameters, and tells tables (nn.Embedding, nn.EmbeddingBag) from the rest.
    scheme: "auto", "balanced", "recursive_doubling", "agsparse", "dense_ring" or "dense".
    hosts: one entry per rank, equal for ranks that share a host; found out if None.
    max_bytes: bound on the workspace of one job.
    deadline_s: for one job; the group's time-out if None.
    verify: digests on messages; on if None. Equal values on all ranks, or MismatchError.
    Errors: UnsupportedError, MismatchError, DeadlineError (a rank did not come), PeerLostError.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: torch.nn.Module | None = None,
        scheme: str = "auto",
        hosts: Sequence[str | int] | None = None,
        max_bytes: int | None = None,
        deadline_s: float | None = None,
        verify: bool | None = None,
    ) -> None:
        self.group = _require_group(process_group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.plans = BucketPlans(ParameterNames(module))
        self.disabled = is_disabled()
        self.last_error: Error | None = None
        self._lock = threading.Lock()
        self._closed = self._forked = False
        self._pid = os.getpid()
        self._counts = {"jobs": 0, "failed": 0}
        self._reports: dict[str, dict[str, Any]] = {}
        if self.disabled:
            return
        _require_native_transport()
        options = {
            "scheme": scheme,
            "max_bytes": max_bytes,
            "deadline_s": deadline_s,
            "verify": verify,
        }
        self._engine, self._dense = open_mesh(self.group, options, _host_names(hosts, self.size))
        self._worker = Worker(f"zensync-{self.rank}", self._remember)
        _exit.register(self)

    # What the glue (`reduce.py`, `ddp_hook.py`) uses.

    @property
    def engine(self) -> _core.Engine:
        """The engine, for jobs. Error if this State is closed or belongs to another process."""
        self.require_usable()
        return self._engine

    @property
    def dense(self) -> Any:
        """The dense group; only for the worker's thread."""
        return self._dense

    def require_usable(self) -> None:
        """Error unless this State can take jobs."""
        if self._forked or self._pid != os.getpid():
            raise Error(
                "this State was made before the process was forked and cannot be used in the "
                "child; make a State and a process group there, or start processes with spawn"
            )
        if self._closed:
            raise Error("this State is closed")

    def call(self, start: Callable[[], Callable[[], Any]]) -> Pending:
        """Makes one call: `start` submits its jobs and returns what the worker then runs.

        Both under the State's lock, so that the order is one, and no job starts while the State
        closes.
        """
        self.require_usable()
        with self._lock:
            self.require_usable()
            self._counts["jobs"] += 1
            return self._worker.submit(start())

    def await_job(self, job: _core.Job, name: str | None) -> _core.Outcome:
        """Waits for a job, keeps its report under `name`, raises its error."""
        while not job.wait(_LONG_S):
            pass
        if job.error is not None:
            raise_error(job.error)
        if name is not None:
            self._reports[name] = {**job.report, "outcome": job.outcome.name.lower()}
        return job.outcome

    def note_failure(self, error: Error) -> None:
        """Counts a failed call and keeps the first error."""
        self._counts["failed"] += 1
        if self.last_error is None:
            self.last_error = error

    def give_up(self, error: Error) -> None:
        """Tells all peers that this rank cannot go on; every later job fails with `error`."""
        self._remember(error)

    def _remember(self, error: Error) -> None:
        self.note_failure(error)
        if self.disabled or self._closed:
            return
        if self._engine.error is None:  # only this rank knows: the others must learn it
            self._abort(error)
        self._dense.break_off()

    def _abort(self, error: Error) -> None:
        info = _core.ErrorInfo(error.kind, error.message, error.tensor or "")
        info.rank = info.culprit = self.rank
        self._engine.abort(info)

    # What users call.

    def stats(self) -> dict[str, Any]:
        """Counts since the State was made.

        jobs, failed: calls. sent_bytes, received_bytes: over the mesh, headers included.
        dense_bytes: handed to the group's all-reduce. sync_s: seconds in which a call was under
        way. tensors: last report by name.
        """
        result: dict[str, Any] = dict(self._counts)
        sent = received = dense = 0
        busy_s = 0.0
        if not self.disabled and not self._forked:
            sent, received = self._engine.wire_count
            dense, busy_s = self._dense.handed_bytes, self._worker.busy_s
        result.update(sent_bytes=sent, received_bytes=received, dense_bytes=dense, sync_s=busy_s)
        result["tensors"] = {name: dict(report) for name, report in list(self._reports.items())}
        return result

    def flush(self) -> None:
        """Waits until every call made so far has ended. Raises none of their errors."""
        self.require_usable()
        if self.disabled:
            return
        with self._lock:
            self.require_usable()
            marker = self._worker.submit(lambda: None)
        marker.wait()

    def close(self, timeout_s: float = _exit.EXIT_LIMIT_S) -> None:
        """Ends the State within `timeout_s`: calls under way may end, what is left then fails.
        Idempotent.

        Not collective, but a peer that still waits for this rank then gets PeerLostError.
        """
        if self._forked or self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.disabled:
            return
        until = time.monotonic() + timeout_s
        self._worker.stop()
        ended = self._worker.join(timeout_s * _ABORT_SHARE)
        if not ended:
            self._abort(PeerLostError(f"rank {self.rank} closed its State before this call ended"))
            self._dense.cancel()
        self._engine.close(max(min(until - time.monotonic(), 1.0), 0.1))
        if not ended and not self._worker.join(max(until - time.monotonic(), 0.1)):
            self._worker.fail_all(Error("the State was closed before this call ended"))
        self._dense.close()

    def mark_forked(self) -> None:
        """Called in a forked child: threads and connections stayed with the parent."""
        self._forked = True
        if not self.disabled:
            self._dense.forget()

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        word = "closed" if self._closed else "disabled" if self.disabled else "open"
        return f"zensync.State(rank {self.rank} of {self.size}, {word})"


def _require_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise Error("torch.distributed is not initialised; call init_process_group first")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise Error("this rank is not in the process group; only its members make a State")
    return found


def _require_native_transport() -> None:
    wanted = _core.environment()["transport"]
    if wanted not in ("", "native"):
        raise UnsupportedError(
            f'ZENSYNC_TRANSPORT is "{wanted}", which is not in this version; only "native" is'
        )


def _host_names(hosts: Sequence[str | int] | None, size: int) -> list[str] | None:
    if hosts is None:
        return None
    if len(hosts) != size:
        raise Error(f"hosts= has {len(hosts)} entries for {size} ranks; give one per rank")
    return [f"host {host}" for host in hosts]


_defaults: dict[int, tuple[dist.ProcessGroup, State]] = {}
_defaults_lock = threading.Lock()


def default_state(group: dist.ProcessGroup | None) -> State:
    """The State that `all_reduce` uses for a group, made at its first use (a collective call).

    Closed at exit, or at the next call here after the group was destroyed.
    """
    wanted = _require_group(group)
    with _defaults_lock:
        for key, (known, state) in list(_defaults.items()):
            if not group_is_alive(known):
                state.close(1.0)
                del _defaults[key]
        if id(wanted) not in _defaults:
            _defaults[id(wanted)] = (wanted, State(wanted))
        return _defaults[id(wanted)][1]
