"""The life of a State: exits with jobs in flight, closing, sub-groups, forks, switching off."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import die, run_ranks, same_bits, sparse

EXIT_LIMIT_S = 5.0


def body_life(rank, size):
    """Two States at once, closed twice, used after closing, in a with statement, sub-groups."""
    one, two = zensync.State(), zensync.State(scheme="agsparse", hosts=[0] * size, verify=False)
    for state in (two, one, two):
        tensor = sparse(rank)
        zensync.all_reduce(tensor, state=state)
        assert torch.equal(tensor, sum(sparse(other) for other in range(size)))
    stats = two.stats()
    assert stats["jobs"] == 2
    assert stats["failed"] == 0
    assert stats["sent_bytes"] > 0
    assert stats["received_bytes"] > 0
    assert stats["sync_s"] > 0
    assert [report["scheme"] for report in stats["tensors"].values()] == ["agsparse"]
    one.flush()
    one.close()
    one.close()
    assert one.stats()["jobs"] == 1
    for call in (one.flush, lambda: zensync.all_reduce(sparse(rank), state=one)):
        with pytest.raises(zensync.Error, match="closed"):
            call()
    zensync.all_reduce(sparse(rank), state=two)  # the other one lives
    two.close()
    with zensync.State(max_bytes=1 << 20, deadline_s=20) as third:
        zensync.all_reduce(sparse(rank), state=third)
    with pytest.raises(TypeError):
        zensync.State(wire_dtype=None)
    with pytest.raises(zensync.Error, match="hosts="):
        zensync.State(hosts=[0] * (size + 1))
    for wrong in (5, "gloo", torch.ones(1)):
        with pytest.raises(zensync.Error, match=f"group is needed, not {type(wrong).__name__}"):
            zensync.State(wrong)
        with pytest.raises(zensync.Error, match="state= must be"):
            zensync.all_reduce(sparse(rank), state=wrong)
    body_groups(rank, size)


def body_groups(rank, size):
    pair = dist.new_group([0, 2])
    rest = dist.new_group([1, 2])
    if rank in (0, 2):
        tensor = sparse(rank)
        zensync.all_reduce(tensor, group=pair)
        assert torch.equal(tensor, sparse(0) + sparse(2))
        assert same_bits(tensor, pair)
    else:
        with pytest.raises(zensync.Error, match="not in the process group"):
            zensync.all_reduce(sparse(rank), group=pair)
    if rank:
        tensor = sparse(rank)
        zensync.all_reduce(tensor, group=rest)
        assert torch.equal(tensor, sparse(1) + sparse(2))
    full = torch.ones(3000, 4)
    for _ in range(2):  # the second is dense
        zensync.all_reduce(full)
    assert (full == size * size).all()
    dist.destroy_process_group()
    with pytest.raises(zensync.Error, match="init_process_group"):
        zensync.all_reduce(full)


def test_life_and_groups():
    run_ranks(3, body_life, store="tcp")


def body_settings(rank, size):
    """Ranks whose settings differ learn it when they make their States."""
    with pytest.raises(zensync.MismatchError, match="scheme="):
        zensync.State(scheme="agsparse" if rank else "balanced")
    with pytest.raises(zensync.Error, match="nonsense"):
        zensync.State(scheme="nonsense")


def body_exit_in_flight(rank, size, dense):
    """Rank 1 never joins; rank 0 ends with jobs in flight. Gives the time when the end began."""
    if dense:
        ready = torch.ones(3000, 4)
        zensync.all_reduce(ready, name="t")
        zensync.all_reduce(ready, name="t")
    else:
        zensync.all_reduce(sparse(rank), name="t")
    if rank == 0:
        for _ in range(3):
            zensync.all_reduce(torch.ones(3000, 4), name="t", async_op=True)
    else:
        time.sleep(8)
    return time.time()


def timed_exit(size, body, *args):
    started = run_ranks(size, body, *args)
    return time.time() - max(started)


def test_different_settings():
    run_ranks(2, body_settings)


@pytest.mark.parametrize("dense", [False, True])
def test_exit_with_jobs_in_flight(dense):
    """Exit codes are 0 (nothing aborts), and the end comes within the bound."""
    assert timed_exit(2, body_exit_in_flight, dense) < EXIT_LIMIT_S + 5


def body_lonely_exit(rank, size):
    """All futures have ended after close, with an error, within the bound."""
    state = zensync.State()
    zensync.all_reduce(sparse(rank), name="t", state=state)
    if rank == 0:
        works = [zensync.all_reduce(sparse(0), name="t", state=state, async_op=True) for _ in "abc"]
        with pytest.raises(zensync.DeadlineError, match="has not ended"):
            works[0].wait(0.2)
        started = time.monotonic()
        state.close()
        assert time.monotonic() - started < EXIT_LIMIT_S + 1
        for work in works:
            assert work.is_completed()
            with pytest.raises(zensync.Error):
                work.wait()
        with pytest.raises(RuntimeError):
            works[0].get_future().wait()
    else:
        time.sleep(7)
        with pytest.raises(zensync.Error, match="rank 0"):  # it is told who left
            zensync.all_reduce(sparse(1), name="t", state=state)
    return os.getpid()


def body_killed(rank, size):
    """A rank that dies is named by the others, whatever they are in, soon."""
    state = zensync.State()
    full = torch.ones(3000, 4)
    for _ in range(2):
        zensync.all_reduce(full, name="t", state=state)
    dist.barrier()
    if rank == 1:
        die()
    started = time.monotonic()
    with pytest.raises(zensync.Error):  # noqa: PT012
        while True:
            zensync.all_reduce(full, name="t", state=state)
    assert time.monotonic() - started < 10
    assert isinstance(state.last_error, zensync.PeerLostError), state.last_error


def test_close_with_jobs_in_flight():
    run_ranks(2, body_lonely_exit, destroy=False)


def test_killed_rank():
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, body_killed)
    text = str(caught.value)
    assert "rank 1 gave no result (exit code -9" in text, text
    assert "rank 0" not in text.replace("exit code -9", ""), text
    assert "rank 2" not in text, text


def body_fork(rank, size):
    """A State in a forked child says so; the child ends cleanly, and the parent goes on."""
    state = zensync.State()
    zensync.all_reduce(sparse(rank), state=state)
    zensync.all_reduce(sparse(rank))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (
                lambda: zensync.all_reduce(sparse(rank), state=state),
                state.flush,
                lambda: zensync.all_reduce(sparse(rank)),
            ):
                with pytest.raises(zensync.Error, match="fork"):
                    call()
            state.close()
            state.stats()
            status = 7
        finally:
            # As `sys.exit` in a child does it, but not through this process's own callers.
            import atexit

            atexit._run_exitfuncs()
            os._exit(status)
    until = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.02)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the child hangs")
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    zensync.all_reduce(sparse(rank), state=state)
    state.close()


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_fork():
    run_ranks(2, body_fork)


def body_disabled(rank, size):
    """The same calls without a mesh; sums stay right, names and rows= are taken."""
    import test_hook

    state = zensync.State(module=None)
    assert state.disabled
    tensor = sparse(rank)
    zensync.all_reduce(tensor, dist.ReduceOp.AVG, name="t", rows=torch.tensor([0]), state=state)
    assert torch.equal(tensor, sum(sparse(other) for other in range(size)) / size)
    coo = sparse(rank).to_sparse(1)
    work = zensync.all_reduce(coo, async_op=True)
    assert work.wait()
    assert torch.equal(coo.to_dense(), sum(sparse(other) for other in range(size)))
    coo = sparse(rank).half().to_sparse(1)
    zensync.all_reduce(coo)
    assert coo.dtype == torch.float16
    assert torch.equal(coo.to_dense(), sum(sparse(other) for other in range(size)).half())
    for is_sparse in (False, True):
        stock = test_hook.train(test_hook.make_model(is_sparse), None, False, steps=2)
        ours = test_hook.train(test_hook.make_model(is_sparse), zensync.State(), False, steps=2)
        test_hook.compare(ours, stock, f"disabled, sparse={is_sparse}")
    with pytest.raises(zensync.UnsupportedError):
        zensync.all_reduce(torch.ones(3, dtype=torch.bool), state=state)
    state.flush()
    assert state.stats()["sent_bytes"] == 0
    state.close()


def test_disabled():
    run_ranks(2, body_disabled, env={"ZENSYNC_DISABLE": "1"})


def body_transport(rank, size):
    with pytest.raises(zensync.UnsupportedError, match="not in this version"):
        zensync.State()


def test_other_transport():
    run_ranks(1, body_transport, env={"ZENSYNC_TRANSPORT": "carrier-pigeon"})
