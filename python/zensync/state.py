"""A State: what one group of ranks synchronises with; its own connections, engine and worker.

States never wait for each other. Making one is a collective call. All calls on one State are made
in the same order on all ranks; its jobs run in that order. Every future ends; after an error that
ranks share, the State refuses jobs until it is made anew.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _exit, _torch_compat
from ._arguments import checked_options, require_count, require_group, require_module
from ._bucket import BucketPlans
from ._check import SumChecks
from ._debug import say_job, span
from ._dense import DenseGroup, tell_notices
from ._device import Passage
from ._device_plan import Choices
from ._groups import Groups
from ._join import JoinableState
from ._mesh import open_mesh, refuse_mesh
from ._names import ParameterNames
from ._settings import is_disabled
from ._worker import WAITS_FOR_ITSELF, Pending, Worker, as_error
from .errors import (
    DeadlineError,
    Error,
    PeerLostError,
    UnsupportedError,
    make_error,
    raise_error,
)

_ABORT_SHARE = 0.6  # of a bound on close: for jobs to end by themselves
_NOTICE_S = 1.0  # how often a wait looks for something to tell
_SETTLE_S = 10.0  # for the jobs of a call that failed, once they were aborted

Run = Callable[[], Any]  # what the worker runs
Start = Callable[[], Run]  # submits jobs


class State(JoinableState):
    """Synchronises tensors of the ranks of `process_group` (the default group if None).

    module: names its parameters, and tells tables (nn.Embedding, nn.EmbeddingBag) from the rest.
    scheme: "auto", "balanced", "recursive_doubling", "agsparse", "dense_ring" or "dense".
    hosts: one entry per rank, equal for ranks that share a host; found out if None.
    max_bytes: a target for the workspace of `balanced` alone (more chunks); not a hard bound.
    deadline_s: for one job; the group's time-out if None.
    silent_after_s: a rank whose heartbeat has stopped for so long is given up by those who wait.
    verify: digests on messages; on if None. Equal values on all ranks, or MismatchError.
    check_every: k > 0 compares every k-th sum of each name with the dense one, within rounding, and
    raises MismatchError that names tensor, rank and row; costs a copy and three dense all-reduces.
    Errors: UnsupportedError, MismatchError, DeadlineError (a rank did not come), PeerLostError.
    """

    _closed = True  # until it is made

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        module: torch.nn.Module | None = None,
        scheme: str = "auto",
        hosts: Sequence[str | int] | None = None,
        max_bytes: int | None = None,
        deadline_s: float | None = None,
        silent_after_s: float = 60.0,
        verify: bool | None = None,
        check_every: int = 0,
        _tuning: dict[str, Any] | None = None,
    ) -> None:
        self.group = require_group(process_group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.disabled = is_disabled()
        self.scheme = scheme
        self.transport = "none"
        self.last_error: Error | None = None
        self._lock = threading.Lock()
        self._forked = False
        self._pid = os.getpid()
        self._counts_lock = threading.Lock()
        self._counts = {"jobs": 0, "failed": 0}
        self.reports: dict[str, dict[str, Any]] = {}  # the last one by name
        self.choices = Choices(scheme)  # for tensors on devices
        self._no_sync: Callable[[], contextlib.AbstractContextManager[None]] | None = None
        self._jobs: list[_core.Job] = []  # of the call that is being made, under the lock

        given = {
            "scheme": scheme,
            "max_bytes": max_bytes,
            "deadline_s": deadline_s,
            "silent_after_s": silent_after_s,
            "verify": verify,
            "hosts": hosts,
        }

        def choose() -> dict[str, Any]:
            """What this rank alone can find wrong; its peers are told."""
            require_module(module)
            every = require_count("check_every", check_every)
            options = checked_options(given, self.rank, self.size, self.disabled)
            return {**options, "caller_settings": f"check_every={every}", **(_tuning or {})}

        if self.disabled:
            choose()
            refuse_mesh(self.group, Error("ZENSYNC_DISABLE=1 is set there, but not on all ranks"))
        else:
            self._engine, self._groups, way = open_mesh(self.group, choose)
            if self.size > 1:
                self.transport = way.transport
            self._worker = Worker(f"zensync-{self.rank}")
        self.checks = SumChecks(check_every)
        self.plans = BucketPlans(ParameterNames(module))
        self._closed = False
        _exit.register(self)

    def __del__(self) -> None:
        """The connections go with the State: a peer that still waits for this rank is told."""
        if not self._closed and not sys.is_finalizing():
            self.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # What the glue (`reduce.py`, `ddp_hook.py`) uses.

    @property
    def engine(self) -> _core.Engine:
        """The engine, for jobs. Error if this State is closed or belongs to another process."""
        self.require_usable()
        return self._engine

    @property
    def dense(self) -> DenseGroup:
        """The dense all-reduces of CPU tensors; only for the worker's thread."""
        return self._groups.cpu

    @property
    def groups(self) -> Groups:
        """All that it sends over besides the engine."""
        return self._groups

    def require_usable(self) -> None:
        """Error unless this State can take jobs."""
        if self._forked or self._pid != os.getpid():
            raise Error(
                "this State was made before the process was forked and cannot be used in the "
                "child; make a State and a process group there, or start processes with spawn"
            )
        if self._closed:
            raise Error("this State is closed")

    def require_coo(self) -> None:
        """UnsupportedError if this State cannot sum COO tensors."""
        if self.scheme == "dense_ring":
            raise UnsupportedError('scheme="dense_ring" is for dense-stored tensors, not for COO')

    def has_failed(self) -> bool:
        """Whether it refuses jobs since an error that ranks share, none of which is gone."""
        if self.disabled or self._closed or self._forked:
            return False
        error = self._engine.error
        return error is not None and error.kind not in (PeerLostError.kind, DeadlineError.kind)

    def require_waitable(self, what: str) -> None:
        """Error on the worker's thread, where `what` would wait for itself for ever."""
        if not self.disabled and self._worker.is_current():
            raise Error(WAITS_FOR_ITSELF.format(what=what))

    def call(self, start: Start, name: str = "call", passage: Passage | None = None) -> Pending:
        """Makes one call: `start` submits its jobs and returns what the worker then runs.

        Both under the State's lock, so that the order is one, and no job starts while the State
        closes. What `start` refers to is held until its jobs have ended, whatever happens.
        name: what traces call it. passage: of tensors on a device (`Groups.passage`).
        """
        self.require_usable()
        with span(f"launch {name}"), self._lock:
            self.require_usable()
            self._count("jobs")
            jobs = self._jobs = []
            interrupt: BaseException | None = None
            try:
                run = start()
                pending = self._worker.submit(lambda: self._finish(start, run, jobs, name), passage)
            except BaseException as why:
                if not jobs:
                    raise
                failed = _raiser(as_error(why, self.rank))
                self._abort(as_error(why, self.rank))  # the jobs would wait for their like
                interrupt = None if isinstance(why, Exception) else why
                pending = self._worker.submit(lambda: self._finish(start, failed, jobs, name))
        if interrupt is not None:
            raise interrupt
        return pending

    def submit_dense(self, tensor: _core.DenseTensor, options: _core.JobOptions) -> _core.Job:
        """A job on dense memory, inside `start` of a call."""
        return self.submitted(self._engine.submit_dense(tensor, options))

    def submit_coo(self, tensor: _core.CooTensor, options: _core.JobOptions) -> _core.Job:
        """A job on a COO tensor, inside `start` of a call."""
        return self.submitted(self._engine.submit_coo(tensor, options))

    def agree(self, items: list[tuple[_core.DenseTensor, _core.JobOptions, bool]]) -> _core.Job:
        """A round before dense all-reduces, inside `start` of a call."""
        return self.submitted(self._engine.agree(items))

    def submitted(self, job: _core.Job) -> _core.Job:
        """Notes a job of this State's engine, inside `start` of a call."""
        self._jobs.append(job)
        return job

    def _finish(self, start: Start, run: Run, jobs: list[_core.Job], name: str) -> Any:
        """Runs a call. After an error its jobs are waited for: they may write to what it holds."""
        try:
            with span(f"sync {name}"):
                return run()
        except BaseException as why:
            error = self._fail(as_error(why, self.rank))
            until = time.monotonic() + _SETTLE_S
            if not all(job.wait(max(until - time.monotonic(), 0.0)) for job in jobs):
                _torch_compat.keep_forever((start, run))
            raise error  # noqa: B904  (it is `why`, has it as its cause, or is what caused it)

    def await_job(self, job: _core.Job, name: str | None) -> _core.Outcome:
        """Waits for a job, keeps its report under `name`, raises its error."""
        while not job.wait(_NOTICE_S):
            tell_notices(self._engine)
        tell_notices(self._engine)
        if job.error is not None:
            raise_error(job.error)
        if name is not None:
            report = {**job.report, "outcome": job.outcome.name.lower()}
            say_job(self.rank, name, report, self.reports.get(name))
            self.reports[name] = report
        return job.outcome

    def note_failure(self, error: Error) -> None:
        """Counts a failed call and keeps the first error."""
        self._count("failed")
        with self._counts_lock:
            if self.last_error is None:
                self.last_error = error

    def give_up(self, error: Error) -> None:
        """Tells all peers that this rank cannot go on; every later job fails with `error`.

        From any thread: what takes longer is left to the worker.
        """
        if self.disabled or self._forked:
            self.note_failure(error)
            return
        self._abort(error)
        self.note_failure(self._settled(error))
        with self._lock:
            if not self._closed:
                self._worker.submit(self._groups.break_off)

    def _fail(self, error: Error) -> Error:
        """As `give_up`, on the worker; raises nothing. Returns what all ranks call the error."""
        try:
            self._abort(error)
            error = self._settled(error)
            self.note_failure(error)
            self._groups.break_off()
        except Exception as why:
            error.add_note(f"and then, while telling the other ranks: {type(why).__name__}: {why}")
        return error

    def _settled(self, error: Error) -> Error:
        """What all ranks call `error`: itself where it says the same, perhaps after more words."""
        known = self._engine.settled()
        if known is None:
            return error
        told = make_error(known)
        # Several ranks may fail with one text at once, each with itself as the culprit.
        is_own = error.message.endswith(told.message) and error.culprit == told.culprit
        return error if is_own else told

    def _abort(self, error: Error) -> None:
        if self._engine.error is not None:
            return  # that one was told
        info = _core.ErrorInfo(error.kind, error.message, error.tensor or "")
        info.rank = self.rank
        info.culprit = -1 if error.culprit is None else error.culprit
        self._engine.abort(info)

    def _count(self, what: str) -> None:
        with self._counts_lock:
            self._counts[what] += 1

    # What users call.

    def stats(self) -> dict[str, Any]:
        """Counts since the State was made.

        jobs, failed: calls. sent_bytes, received_bytes: by exchanges, headers included.
        dense_bytes: handed to the dense all-reduce. sync_s: seconds in which a call was under
        way. tensors: last report by name.
        """
        result: dict[str, Any] = dict(self._counts)
        sent = received = dense = 0
        busy_s = 0.0
        if not self.disabled and not self._forked:
            sent, received = self._groups.wire_count()
            dense, busy_s = self._groups.handed_bytes, self._worker.busy_s
        result.update(sent_bytes=sent, received_bytes=received, dense_bytes=dense, sync_s=busy_s)
        result["tensors"] = {name: dict(report) for name, report in list(self.reports.items())}
        return result

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For accumulation: backward passes inside do not communicate, COO gradients are coalesced.

        The next backward outside averages all that was added up. Of a State that `attach` returned.
        """
        if self._no_sync is None:
            raise Error("no_sync() is for a State that zensync.attach returned; DDP has its own")
        return self._no_sync()

    def set_no_sync(self, enter: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """What `no_sync` does; for `attach`."""
        self._no_sync = enter

    def flush(self) -> None:
        """Waits until every call made so far has ended. Raises none of their errors."""
        self.require_usable()
        if self.disabled:
            return
        self.require_waitable("flush()")
        with self._lock:
            self.require_usable()
            marker = self._worker.submit(lambda: None)
        marker.wait()

    def close(self, timeout_s: float = _exit.EXIT_LIMIT_S) -> None:
        """Ends the State within `timeout_s`: calls under way may end, the rest fails. Idempotent.

        Not collective, but a peer that waits for this rank, or calls later, gets PeerLostError.
        In a callback of a future, calls under way fail at once.
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
            text = f"rank {self.rank} closed its State before this call ended"
            self._abort(PeerLostError(text, culprit=self.rank))
            self._groups.cancel()
        self._engine.close(max(min(until - time.monotonic(), 1.0), 0.1))
        if not ended and not self._worker.join(max(until - time.monotonic(), 0.1)):
            self._worker.fail_all(Error("the State was closed before this call ended"))
        self._groups.close()

    def mark_forked(self) -> None:
        """Called in a forked child: threads and connections stayed with the parent."""
        self._forked = True
        if not self.disabled:
            self._engine.forget()
            self._groups.forget()

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        word = "closed" if self._closed else "disabled" if self.disabled else "open"
        return f"zensync.State(rank {self.rank} of {self.size}, {word})"


def _raiser(error: Error) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run
