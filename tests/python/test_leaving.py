"""Ranks that leave: killed, closed, gone from a sum; and waits inside callbacks.

Real processes with short time-outs; every hang would be a failure.
"""

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import zensync
from failing import bound
from ranks import SOON_S, die, run_ranks, sparse


def body_killed_in_all_reduce(rank, size):
    """The others are in Gloo then, their engines idle."""
    state = zensync.State(scheme="dense", deadline_s=30)
    full = torch.ones(4_000_000)
    zensync.all_reduce(full, state=state)
    if rank == 1:
        state.dense._finish = lambda *_: die()  # all ranks have agreed, and entered
    started = time.monotonic()
    with pytest.raises(zensync.PeerLostError) as caught:  # noqa: PT012
        while True:
            zensync.all_reduce(full, state=state)
    assert time.monotonic() - started < bound(5.0)
    assert caught.value.culprit == 1, caught.value
    assert caught.value is state.last_error
    time.sleep(6)  # the others learn it though this process lives, and holds the error


def test_killed_in_the_dense_all_reduce():
    with pytest.raises(AssertionError) as caught:
        run_ranks(5, body_killed_in_all_reduce)
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

        state.dense._backend = type("Broken", (), {"allreduce": broken})()
    with pytest.raises(zensync.Error) as caught:
        zensync.all_reduce(torch.ones(100), state=state)
    if rank == 0:
        assert isinstance(caught.value, zensync.PeerLostError)
        assert "could not be started" in caught.value.message, caught.value
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
    run_ranks(2, body_leaving, timeout_s=100, destroy=False)
