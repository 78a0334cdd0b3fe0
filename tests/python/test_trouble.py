"""Calls that fail: memory outlives the jobs, all futures end, ranks name the right culprit."""

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import SOON_S, run_ranks, sparse
from torch.nn.parallel import DistributedDataParallel
from zensync import _core, _worker
from zensync import state as state_module


def submit(state, tensor, name="t"):
    """A job on `tensor`, as the glue makes it."""
    spec = _core.TensorSpec(len(tensor), 4, _core.DType.F32)
    view = _core.DenseTensor(tensor.data_ptr(), spec)
    return state.submit_dense(view, _core.JobOptions(name, _core.ReduceOp.SUM))


# ---- the worker


def test_nothing_ends_the_worker():
    """Whatever a call or a callback raises, later futures end."""
    worker = _worker.Worker("test")

    def raises(why):
        raise why

    for why in (ValueError("x"), SystemExit(3), KeyboardInterrupt(), zensync.Error("y")):
        pending = worker.submit(lambda why=why: raises(why))
        assert pending.wait(10)
        assert pending.error is why or pending.error.__cause__ is why
    gate = threading.Event()
    for callback in (lambda _: raises(SystemExit(4)), lambda _: raises(ValueError("z"))):
        pending = worker.submit(gate.wait)
        pending.future.then(callback)
        pending.future.add_done_callback(callback)
        gate.set()
        assert pending.wait(10)
    pending = worker.submit(lambda: time.sleep(0.1))
    pending.future.set_result("somebody else's")
    assert pending.wait(10)
    assert worker.submit(lambda: 7).future.wait() == 7
    worker.stop()
    assert worker.join(10)


def test_an_idle_worker_keeps_nothing_alive():
    worker = _worker.Worker("test")
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    pending = worker.submit(lambda tensor=tensor: [tensor])
    assert pending.wait(10)
    del pending, tensor
    until = time.monotonic() + 5
    while alive() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert alive() is None
    worker.stop()
    assert worker.join(10)


def test_sums_do_not_flush_denormals():
    torch.set_flush_denormal(True)
    try:
        worker = _worker.Worker("test")
    finally:
        torch.set_flush_denormal(False)
    tiny = torch.tensor([1e-40])
    assert worker.submit(lambda: (tiny * 1.0).item()).future.wait() > 0
    worker.stop()


# ---- memory


def forget_frames(error):
    """The traceback of an error, and of those below it, holds what the frames held."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def body_memory(rank, size):
    """A call that fails while its jobs run ends after they have ended, and holds memory so long.

    Rank 0 alone submits, so its jobs cannot end by themselves.
    """
    for after in ("start", "run", "BaseException"):
        state = zensync.State(deadline_s=15)
        if rank == 0:
            jobs = []
            tensor = sparse(0)
            alive = weakref.ref(tensor)

            def start(tensor=tensor, state=state, after=after, jobs=jobs):
                jobs.append(submit(state, tensor))
                jobs.append(submit(state, tensor, "u"))
                if after == "start":
                    raise ValueError("made")
                if after == "BaseException":
                    raise KeyboardInterrupt

                def run():
                    raise ValueError("made")

                return run

            if after == "BaseException":
                with pytest.raises(KeyboardInterrupt):
                    state.call(start)
                state.flush()
            else:
                pending = state.call(start)
                seen = []
                pending.future.add_done_callback(
                    lambda _, jobs=jobs, seen=seen: seen.extend(job.done() for job in jobs)
                )
                assert pending.wait(SOON_S)
                assert pending.error.message == "ValueError while synchronising: made"
                assert pending.error.culprit == 0
                until = time.monotonic() + SOON_S
                while not seen and time.monotonic() < until:
                    time.sleep(0.01)
                assert seen == [True, True]
            assert all(job.done() for job in jobs)
            del tensor, start
            forget_frames(state.last_error)
            pending = None
            gc.collect()
            assert alive() is None
        else:
            time.sleep(0.5)
            with pytest.raises(zensync.Error, match=r"made|Keyboard") as caught:
                zensync.all_reduce(sparse(1), name="t", state=state)
            assert caught.value.culprit == 0
        state.close()


def body_jobs_that_never_end(rank, size):
    """What the engine may still write is kept for ever."""
    if rank == 0:
        state_module._SETTLE_S = 0.1

    class Stuck:
        def wait(self, timeout_s):
            return False

    state = zensync.State()
    if rank == 0:
        tensor = sparse(0)
        alive = weakref.ref(tensor)

        def start(tensor=tensor):
            state.submitted(Stuck())
            tensor.add_(1)
            raise ValueError("made")

        pending = state.call(start)
        assert pending.wait(SOON_S)
        del tensor, start, pending
        forget_frames(state.last_error)
        gc.collect()
        assert alive() is not None
    state.close()


class CountedWaits:
    """An engine that counts the dense all-reduces in which its control was told to wait."""

    def __init__(self, engine):
        self._engine = engine
        self.begun = self.ended = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def begin_dense(self, name):
        self.begun += 1
        self._engine.begin_dense(name)

    def end_dense(self):
        self.ended += 1
        self._engine.end_dense()


def break_on_the_way(state, method):
    """A bucket's calls raise in `method`: of the dense group, or as the sparse job is awaited."""
    owner = state if method == "await_job" else state.dense
    real = getattr(owner, method)

    def broken(*args, **named):
        if method == "await_job" and args[1] is None:  # the agreement before the dense part
            return real(*args, **named)
        raise ValueError(f"made in {method}")

    setattr(owner, method, broken)


def body_hook_fails(rank, size):
    """Each step of a bucket's way raises on one rank: jobs have ended when the future ends, and
    nobody waits in a dense all-reduce any more."""
    torch.manual_seed(1)
    for method in ("_start", "_finish", "await_job"):
        model = torch.nn.Sequential(torch.nn.Embedding(8192, 16), torch.nn.Linear(16, 4))
        state = zensync.State(module=model)
        jobs = []
        real = state.submitted
        state.submitted = lambda job, jobs=jobs, real=real: jobs.append(job) or real(job)
        waits = state.dense._engine = CountedWaits(state._engine)
        if rank == 1:
            break_on_the_way(state, method)
        ddp = DistributedDataParallel(model, bucket_cap_mb=64)
        ddp.register_comm_hook(state, zensync.hook)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            step_and_more(ddp, state, rank)
        assert time.monotonic() - started < SOON_S
        assert jobs
        assert all(job.done() for job in jobs)
        assert waits.begun == waits.ended, method
        if rank == 1:
            assert waits.begun == (0 if method == "_start" else 1), method
            expected = f"ValueError while synchronising: made in {method}"
            assert state.last_error.message == expected, state.last_error
        assert state.last_error.culprit == 1, state.last_error
        state.close()


def step_and_more(ddp, state, rank):
    """A rank whose peer fails after the sum learns it in the next call."""
    ddp(torch.arange(8) + rank).sum().backward()
    zensync.all_reduce(torch.ones(3), state=state)


class BadBucket:
    def buffer(self):
        raise ValueError("no buffer")


def body_hook_raises(rank, size):
    """A hook that fails by itself tells the peers at once, and leaves Gloo to the worker."""
    state = zensync.State()
    if rank == 1:
        threads = []
        real = state.dense.break_off
        state.dense.break_off = lambda: (
            threads.append(threading.current_thread().name),
            time.sleep(3.0),
            real(),
        )
        started = time.monotonic()
        future = zensync.hook(state, BadBucket())
        assert time.monotonic() - started < 2.5
        with pytest.raises(RuntimeError, match="no buffer"):
            future.wait()
        state.flush()
        assert threads == ["zensync-1"]
    else:
        with pytest.raises(zensync.Error, match="no buffer") as caught:
            zensync.all_reduce(sparse(rank), state=state)
        assert caught.value.culprit == 1
    state.close()


def body_trouble_on_the_way(rank, size):
    """An error while telling the others is a note on the first; later futures end."""
    state = zensync.State()

    def broken():
        raise ValueError("cannot break off")

    state.dense.break_off = broken

    def start():
        def run():
            raise ValueError("first")

        return run

    pending = state.call(start)
    assert pending.wait(SOON_S)
    assert "first" in pending.error.message
    assert "cannot break off" in pending.error.__notes__[0]
    with pytest.raises(zensync.Error):
        zensync.all_reduce(torch.ones(3), state=state)
    assert state.last_error is pending.error
    del state.dense.break_off
    state.close()


def body_memory_and_hooks(rank, size):
    body_memory(rank, size)
    body_jobs_that_never_end(rank, size)
    body_hook_fails(rank, size)
    body_hook_raises(rank, size)
    body_trouble_on_the_way(rank, size)


def test_memory_and_hooks():
    run_ranks(2, body_memory_and_hooks, timeout_s=100)


# ---- who did it


def body_all_fail_alike(rank, size):
    state = zensync.State()
    zensync.all_reduce(torch.ones(3), state=state)
    dist.barrier()

    def start():
        def run():
            raise ValueError("the same text")

        return run

    pending = state.call(start)
    assert pending.wait(SOON_S)
    assert state.last_error is pending.error
    with pytest.raises(zensync.Error) as later:
        zensync.all_reduce(torch.ones(3), state=state)
    dist.barrier()
    state.close()
    return pending.error.culprit, later.value.culprit


def test_ranks_that_fail_alike_at_once_name_one():
    culprits = {one for both in run_ranks(3, body_all_fail_alike) for one in both}
    assert len(culprits) == 1, culprits


def body_one_word_of_all(rank, size):
    """What a peer said first is not the error where all ranks settled on another."""
    state = zensync.State()
    engine = state._engine

    class Settling:
        error = zensync._core.ErrorInfo("mismatch", "the same text")

        def settled(self):
            return engine_error("the same text", 0)

    def engine_error(text, culprit):
        info = zensync._core.ErrorInfo("mismatch", text)
        info.culprit = culprit
        return info

    Settling.error.culprit = 1
    state._engine = Settling()
    own = zensync.MismatchError("the same text", culprit=1)
    settled = state._settled(own)
    state._engine = engine
    state.close()
    return settled.culprit


def test_what_a_peer_says_first_is_not_yet_the_error():
    assert run_ranks(1, body_one_word_of_all) == [0]
