"""Calls that fail: memory outlives the jobs, all futures end, ranks name the right culprit, and a
rank that leaves is missed at once."""

import gc
import os
import pickle
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from zensync import _core, _worker
from zensync import state as state_module

SOON_S = 4.0


def sparse(rank, rows=500):
    tensor = torch.zeros(rows, 4)
    tensor[rank::50] = rank + 1
    return tensor


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
            state._submitted(Stuck())
            tensor.add_(1)
            raise ValueError("made")

        pending = state.call(start)
        assert pending.wait(SOON_S)
        del tensor, start, pending
        forget_frames(state.last_error)
        gc.collect()
        assert alive() is not None
    state.close()


def body_hook_fails(rank, size):
    """Each step of a bucket's way raises on one rank: jobs have ended when the future ends."""
    torch.manual_seed(1)
    for method in ("start", "finish"):
        model = torch.nn.Sequential(torch.nn.Embedding(8192, 16), torch.nn.Linear(16, 4))
        state = zensync.State(module=model)
        jobs = []
        real = state._submitted
        state._submitted = lambda job, jobs=jobs, real=real: jobs.append(job) or real(job)
        if rank == 1:

            def broken(*_, method=method):
                raise ValueError(f"made in {method}")

            setattr(state._dense, method, broken)
        ddp = DistributedDataParallel(model, bucket_cap_mb=64)
        ddp.register_comm_hook(state, zensync.hook)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            two_steps(ddp, rank)
        assert time.monotonic() - started < SOON_S
        assert jobs
        assert all(job.done() for job in jobs)
        if rank == 1:
            assert state.last_error.message == f"ValueError while synchronising: made in {method}"
        assert state.last_error.culprit == 1, state.last_error
        state.close()


def two_steps(ddp, rank):
    """A rank whose peer fails after the sum learns it in the step after."""
    for _ in range(2):
        ddp(torch.arange(8) + rank).sum().backward()


class BadBucket:
    def buffer(self):
        raise ValueError("no buffer")


def body_hook_raises(rank, size):
    """A hook that fails by itself tells the peers at once, and leaves Gloo to the worker."""
    state = zensync.State()
    if rank == 1:
        threads = []
        real = state._dense.break_off
        state._dense.break_off = lambda: (
            threads.append(threading.current_thread().name),
            time.sleep(0.5),
            real(),
        )
        started = time.monotonic()
        future = zensync.hook(state, BadBucket())
        assert time.monotonic() - started < 0.45
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

    state._dense.break_off = broken

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
    del state._dense.break_off
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


def die():
    path = os.environ["ZENSYNC_TEST_RESULT"]
    with open(path, "wb") as result:
        pickle.dump({"value": None, "error": None}, result)
    os.kill(os.getpid(), signal.SIGKILL)


def body_killed_in_all_reduce(rank, size):
    """The others are in Gloo then, their engines idle."""
    state = zensync.State(scheme="dense", deadline_s=30)
    full = torch.ones(4_000_000)
    zensync.all_reduce(full, state=state)
    if rank == 1:
        state._dense.finish = lambda _: die()  # all ranks have agreed, and entered
    started = time.monotonic()
    with pytest.raises(zensync.PeerLostError) as caught:  # noqa: PT012
        while True:
            zensync.all_reduce(full, state=state)
    assert time.monotonic() - started < 5
    assert caught.value.culprit == 1, caught.value
    assert caught.value is state.last_error
    time.sleep(6)  # the others learn it though this process lives, and holds the error


def test_killed_in_the_dense_all_reduce(tmp_path):
    with pytest.raises(AssertionError) as caught:
        run_ranks(5, body_killed_in_all_reduce, env={"ZENSYNC_TEST_RESULT": str(tmp_path / "dead")})
    text = str(caught.value)
    assert text.startswith("rank 1 gave no result (exit code -9"), text
    for survivor in (0, 2, 3, 4):
        assert f"rank {survivor}" not in text, text


def body_true_error(rank, size):
    """A rank whose engine fails does not enter Gloo: who waits there learns the true error."""
    for late in (False, True):
        state = zensync.State(deadline_s=30)
        full = torch.ones(4000, 4)
        for _ in range(2):
            zensync.all_reduce(full, name="full", state=state)
        if rank == 0:
            time.sleep(0.5 * late)
            state.give_up(zensync.MismatchError("made to differ", culprit=0))
        started = time.monotonic()
        with pytest.raises(zensync.MismatchError, match="made to differ") as caught:  # noqa: PT012
            state.dense.all_reduce(full)  # as after a job that all have ended
            zensync.all_reduce(full, name="full", state=state)
        assert time.monotonic() - started < SOON_S
        assert caught.value.culprit == 0
        state.close()


def body_nobody_known(rank, size):
    """Gloo fails on a rank, and the mesh knows of nobody who is gone: no rank is blamed."""
    state = zensync.State(scheme="dense")
    if rank == 0:

        def broken(*_):
            raise RuntimeError("made to fail")

        state._dense._gloo = type("Broken", (), {"allreduce": broken})()
    with pytest.raises(zensync.Error) as caught:
        zensync.all_reduce(torch.ones(100), state=state)
    if rank == 0:
        assert isinstance(caught.value, zensync.PeerLostError)
        assert "could not be started" in caught.value.message
    assert caught.value.culprit in (None, 0) if rank else caught.value.culprit is None
    state.close()


# ---- who left


def body_closed(rank, size):
    """close(), or letting a State go, while it is idle: the peer's next call fails at once."""
    for how in ("close", "del", "default"):
        state = None if how == "default" else zensync.State(deadline_s=20)
        group = dist.new_group(list(range(size))) if how == "default" else None
        for tensor in (sparse(rank), torch.ones(3000, 4), torch.ones(3000, 4)):
            zensync.all_reduce(tensor, name="t", state=state, group=group)
        if rank == 0:
            if how == "close":
                state.close()
            elif how == "del":
                alive = weakref.ref(state)
                del state
                gc.collect()
                assert alive() is None
            else:
                dist.destroy_process_group(group)
                zensync.all_reduce(torch.ones(3), group=lonely(rank))  # looks after the others
        else:
            lonely(rank) if how == "default" else None
            time.sleep(0.5)
            started = time.monotonic()
            with pytest.raises(zensync.PeerLostError, match="rank 0") as caught:
                zensync.all_reduce(sparse(rank), name="t", state=state, group=group)
            assert time.monotonic() - started < SOON_S
            assert caught.value.culprit == 0
            if state is not None:
                state.close()


def lonely(rank):
    groups = [dist.new_group([0]), dist.new_group([1])]
    return groups[rank]


# ---- waiting in callbacks


def on_worker(state, rank, action):
    """Runs `action` in a callback on rank 0's worker; what it gave or raised. None elsewhere."""
    if rank:
        time.sleep(0.3)  # so that the future has not ended when rank 0 adds its callback
        zensync.all_reduce(sparse(rank), name="first", state=state)
        return None
    work = zensync.all_reduce(sparse(0), name="first", state=state, async_op=True)
    result = []

    def callback(_):
        assert threading.current_thread().name == "zensync-0"
        try:
            result.append(action())
        except BaseException as why:
            result.append(why)

    done = work.get_future().then(callback)
    until = time.monotonic() + SOON_S
    while not done.done():
        assert time.monotonic() < until, "it waits for itself"
        time.sleep(0.01)
    return result[0]


def body_callbacks(rank, size):
    state = zensync.State(deadline_s=20)
    waits = (
        lambda: zensync.all_reduce(torch.ones(3), state=state),
        lambda: zensync.all_reduce(torch.ones(3).to_sparse(), state=state),
        state.flush,
    )
    for action in waits:
        error = on_worker(state, rank, action)
        if rank == 0:
            assert type(error) is zensync.Error
            assert "async_op=True" in str(error)
            assert "wait for itself" in str(error)
    assert state.last_error is None  # and the State is as it was
    for wait in ("wait", "result"):
        tensor = sparse(rank)
        work = on_worker(
            state, rank, lambda t=tensor: zensync.all_reduce(t, state=state, async_op=True)
        )
        if rank:
            zensync.all_reduce(tensor, state=state)
        else:
            work.wait()
        error = on_worker(
            state,
            rank,
            lambda t=tensor, wait=wait: getattr(
                zensync.all_reduce(t, state=state, async_op=True), wait
            )(),
        )
        if rank:
            zensync.all_reduce(tensor, state=state)
        else:
            assert "wait for itself" in str(error)
            state.flush()
    state.close()
    body_close_in_callback(rank, size)


def body_close_in_callback(rank, size):
    for behind in (False, True):
        state = zensync.State(deadline_s=20)
        works = []

        def close(state=state, works=works, behind=behind):
            if behind:  # what is still under way fails, and ends
                works.append(zensync.all_reduce(torch.ones(3), state=state, async_op=True))
            started = time.monotonic()
            state.close()
            return time.monotonic() - started

        took = on_worker(state, rank, close)
        if rank == 0:
            assert took < SOON_S
            for work in works:
                assert work.is_completed()
                assert isinstance(work.exception(), zensync.Error)
            state._worker._thread.join(SOON_S)
            assert not state._worker._thread.is_alive()
        state.close()


def body_leaving(rank, size):
    body_callbacks(rank, size)
    body_true_error(rank, size)
    body_nobody_known(rank, size)
    body_closed(rank, size)


def test_leaving_and_callbacks():
    run_ranks(2, body_leaving, timeout_s=100)
