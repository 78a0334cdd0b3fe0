"""States that are made on some ranks only, or fail on one: the others learn why within seconds, and
the next attempt of all ranks works."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import SOON_S, run_ranks
from zensync import _torch_compat

WRONG = (
    ({"scheme": "nonsense"}, "nonsense"),
    ({"max_bytes": -1}, "max_bytes"),
    ({"max_bytes": 1.5}, "max_bytes"),
    ({"verify": "x"}, "verify"),
    ({"hosts": ["a"]}, "hosts="),
    ({"hosts": "abc"}, "hosts="),
    ({"hosts": [None, 1, 2]}, "hosts="),
    ({"hosts": 5}, "hosts="),
    ({"module": 3}, "module="),
    *[
        ({"deadline_s": value}, "deadline_s=")
        for value in (0, -1, 0.0, float("nan"), float("inf"), "5", True)
    ],
)


def works(rank, size):
    """All ranks make a State and use it."""
    with zensync.State(deadline_s=20) as state:
        tensor = torch.full((30,), float(rank + 1))
        zensync.all_reduce(tensor, state=state)
        assert (tensor == size * (size + 1) / 2).all()


def soon(call, kind, match):
    """`call` raises `kind` within seconds; the error."""
    started = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        call()
    assert time.monotonic() - started < SOON_S
    return caught.value


def body_wrong_on_one_rank(rank, size):
    for place, (options, text) in enumerate(WRONG):
        odd = place % size
        if rank == odd:
            time.sleep(0.2 * (place % 2))  # before, or while the others wait
            soon(lambda options=options: zensync.State(**options), zensync.Error, text)
        else:
            if place % 3 == 0:
                time.sleep(0.1)
            error = soon(zensync.State, zensync.Error, f"rank {odd} could not make .*{text}")
            assert error.culprit == odd
        if place % 4 == 0:
            works(rank, size)
    works(rank, size)


def body_wrong_on_all_ranks(rank, size):
    for options, text in WRONG:
        soon(lambda options=options: zensync.State(**options), zensync.Error, text)
    works(rank, size)


def body_not_all_came(rank, size):
    """Every set of ranks but all of them: who came is told who did not."""
    for came in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1)):
        if rank in came:
            error = soon(
                lambda: zensync.State(deadline_s=1.0), zensync.DeadlineError, "did not come"
            )
            assert error.culprit in set(range(size)) - set(came)
        dist.barrier()
        works(rank, size)
        dist.barrier()
    for _ in range(3):  # out of step by more than one
        if rank == 1:
            with pytest.raises(zensync.DeadlineError):
                zensync.State(deadline_s=0.3)
    dist.barrier()
    works(rank, size)


def body_interrupted(rank, size):
    """Ctrl-C on a rank that waits alone comes through, at once."""
    if rank == 0:
        interrupt = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        interrupt.start()
        soon(zensync.State, KeyboardInterrupt, "")
    dist.barrier()
    works(rank, size)


def body_fails_late(rank, size):
    """One rank fails after its connections stand."""
    real = _torch_compat.make_gloo
    if rank == 1:

        def broken(*_):
            raise RuntimeError("made to fail")

        _torch_compat.make_gloo = broken
    with pytest.raises(zensync.PeerLostError, match="made to fail" if rank == 1 else ""):
        zensync.State(deadline_s=2)
    _torch_compat.make_gloo = real
    dist.barrier()
    works(rank, size)


def body_two_threads(rank, size):
    """Threads that use two groups in another order on each rank do not wait for each other."""
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    failures = []

    def use(group):
        tensor = torch.ones(20)
        zensync.all_reduce(tensor, group=group)
        if not (tensor == size).all():
            failures.append(tensor)

    threads = []
    for place in range(3):
        threads.append(threading.Thread(target=use, args=(groups[(place + rank) % 3],)))
        threads[-1].start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def body_making(rank, size):
    body_wrong_on_one_rank(rank, size)
    body_wrong_on_all_ranks(rank, size)
    body_not_all_came(rank, size)
    body_interrupted(rank, size)
    body_fails_late(rank, size)
    body_two_threads(rank, size)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_attempts_that_fail(store):
    run_ranks(3, body_making, store=store, timeout_s=120)


def body_environment(rank, size):
    """Set on one rank only; read once, at the first use."""
    if rank == 1:
        os.environ["ZENSYNC_DISABLE"] = "1"
        assert zensync.State().disabled
        return
    if rank == 2:
        os.environ["ZENSYNC_TRANSPORT"] = "ucx"
        soon(zensync.State, zensync.UnsupportedError, "not in this version")
        return
    soon(zensync.State, zensync.Error, "rank [12] could not make its State: ZENSYNC_")


def test_environment_of_one_rank():
    run_ranks(3, body_environment)


def test_without_a_group():
    with pytest.raises(zensync.Error, match="init_process_group"):
        zensync.all_reduce(torch.ones(3))
