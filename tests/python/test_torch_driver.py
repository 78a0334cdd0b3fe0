"""The contract of drivers (core/driver/driver.hpp) over the torch driver, in real processes.

`_core.LinkDriver` is a torch driver without an engine. Bounds on waits are not timings: a hang
would last as long as the time-outs.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from failing import bound
from ranks import die, run_ranks
from zensync import _core, _torch_compat, _torch_driver, _torch_wire

HEAD = _torch_driver.HEAD_BYTES
HEARD_S = 5.0  # even three times that is less than the 20 s of the drivers' own time-outs
LONG_S = 60.0
SIZES = [0, 1, HEAD - 9, HEAD - 8, HEAD - 7, HEAD, 3 * HEAD + 1, (1 << 20) + 5]


def store_for(name):
    return dist.PrefixStore(f"test/{name}", _torch_compat.group_store(dist.group.WORLD))


def open_driver(name="driver", group=None, timeout_s=20.0):
    group = group or dist.group.WORLD
    link = _torch_driver.open_link(group, store_for(name), timeout_s)
    return _core.LinkDriver(dist.get_rank(group), dist.get_world_size(group), link)


def open_padded(rank, size, name="padded"):
    """Over Gloo too, but with what a backend of equal counts needs."""
    gloo = _torch_compat.make_gloo(store_for(name), rank, size, 20.0)
    link = _torch_driver.TorchLink(_torch_wire.GlooWire(gloo, rank, size, pads=True), rank, size)
    return _core.LinkDriver(rank, size, link)


def message(sender, receiver, size_bytes, step=0):
    block = bytes((sender * 31 + receiver * 7 + step * 3 + i) % 251 for i in range(251))
    return (block * (size_bytes // 251 + 1))[:size_bytes]


def others(rank, size):
    return [peer for peer in range(size) if peer != rank]


def everyone(driver, rank, size, bytes_of, step=0, timeout_s=LONG_S):
    """Everyone sends to everyone; whether what came is right. bytes_of(sender, receiver)."""
    peers = others(rank, size)
    sends = [(peer, message(rank, peer, bytes_of(rank, peer), step)) for peer in peers]
    recvs = [(peer, bytes_of(peer, rank)) for peer in peers]
    came = driver.exchange(sends, recvs, timeout_s)
    assert not isinstance(came, _core.ErrorInfo), came.message
    assert came == [message(peer, rank, bytes_of(peer, rank), step) for peer in peers]


# ---- messages


def body_sizes(rank, size):
    for driver in (open_driver(), open_padded(rank, size)):
        for step, first in enumerate(SIZES):
            everyone(driver, rank, size, lambda *_, first=first: first, step)
            mixed = [SIZES[(i + step) % len(SIZES)] for i in range(3 * size + size)]
            everyone(driver, rank, size, lambda a, b, mixed=mixed: mixed[3 * a + b], step)
        assert driver.flush(LONG_S) is None
        sent = received = 0
        for step, first in enumerate(SIZES):
            for peer in others(rank, size):
                sent += 16 + first + SIZES[(3 * rank + peer + step) % len(SIZES)]
                received += 16 + first + SIZES[(3 * peer + rank + step) % len(SIZES)]
        messages = 2 * len(SIZES) * (size - 1)
        assert driver.wire_count == [sent, received, messages, messages]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_of_all_sizes(size):
    """Every pair has another size in every second exchange; also with padded heads."""
    run_ranks(size, body_sizes)


def body_shorter(rank, size):
    """A message may be shorter than its capacity, by any number of bytes."""
    driver = open_driver("shorter")
    for size_bytes in SIZES:
        for capacity in (size_bytes, size_bytes + 1, 1 << 22):
            sends = [(1 - rank, message(rank, 1 - rank, size_bytes))]
            came = driver.exchange(sends, [(1 - rank, capacity)], LONG_S)
            assert came == [message(1 - rank, rank, size_bytes)]


def body_order(rank, size):
    """Several messages to one peer in an exchange, and messages awaited one exchange later."""
    driver = open_driver()
    peer = 1 - rank
    lengths = [7, 2 * HEAD, 0, HEAD + 3]
    texts = [message(0, 1, n, i) for i, n in enumerate(lengths)]
    came = driver.exchange([(peer, t) for t in texts], [(peer, 1 << 20)] * 4, LONG_S)
    assert came == texts
    for step in range(20):  # rank 1 is one exchange behind
        sends = [(peer, message(rank, peer, 40 * step * step, step))]
        awaited = [] if rank and step == 0 else [(peer, 1 << 20)]
        from_step = step - rank
        came = driver.exchange(sends, awaited, LONG_S)
        if awaited:
            assert came == [message(peer, rank, 40 * from_step * from_step, from_step)]
    came = driver.exchange([], [(peer, 1 << 20)] * rank, LONG_S)
    assert came == [message(peer, rank, 40 * 19 * 19, 19)] * rank
    assert driver.flush(LONG_S) is None


def body_pair(rank, size):
    body_shorter(rank, size)
    body_order(rank, size)


def test_order_and_capacities():
    run_ranks(2, body_pair)


def body_one_way(rank, size):
    """Ranks that only send, or only receive; sends are over after a flush."""
    driver = open_driver()
    for size_bytes in SIZES:
        if rank == 0:
            assert driver.exchange([(p, message(0, p, size_bytes)) for p in (1, 2)], [], 9) == []
            assert driver.flush(LONG_S) is None
        else:
            came = driver.exchange([], [(0, 1 << 21)], LONG_S)
            assert came == [message(0, rank, size_bytes)]


def test_one_way():
    run_ranks(3, body_one_way)


# ---- what goes wrong


def is_dead(driver, error, peer):
    """After an error every call returns it."""
    for again in (driver.exchange([], [(peer, 8)], 9), driver.flush(9)):
        assert (again.kind, again.message) == (error.kind, error.message)


def body_too_long(rank, size, by):
    driver = open_driver(f"long/{by}")
    if rank == 0:
        came = driver.exchange([(1, message(0, 1, 50 + by))], [(1, 4)], LONG_S)
        assert came.kind == "peer_lost"  # rank 1 dropped its connections
        assert came.culprit == 1
        return
    came = driver.exchange([], [(0, 50)], LONG_S)
    assert came.kind == "corrupt_message"
    assert came.message == (
        f"rank 0 announced a message of {50 + by} bytes where at most 50 can be expected"
    )
    assert (came.rank, came.culprit) == (1, 0)
    is_dead(driver, came, 0)


def body_invalid(rank, size):
    driver = open_driver("invalid")
    came = driver.exchange([(rank, b"x")], [], 5)
    assert came.kind == "invalid"
    assert f"send to rank {rank}: not a peer" in came.message
    is_dead(driver, came, 1 - rank)


def body_abort_first(rank, size):
    """Nothing of torch is entered after an abort, and an idle driver can be aborted."""
    driver = open_driver("first")
    driver.abort(_core.ErrorInfo("capacity", "full"))
    came = driver.exchange([(1 - rank, b"a")], [(1 - rank, 9)], LONG_S)
    assert (came.kind, came.message) == ("capacity", "full")
    del driver  # and closing it afterwards is no harm


def body_refused(rank, size):
    for by in (1, HEAD, 1 << 20):
        body_too_long(rank, size, by)
    body_invalid(rank, size)
    body_abort_first(rank, size)


def test_what_is_too_long_or_makes_no_sense_and_an_early_abort():
    run_ranks(2, body_refused)


def body_killed(rank, size, step):
    driver = open_driver()
    for _ in range(step):
        everyone(driver, rank, size, lambda *_: 3 * HEAD)
    dist.barrier()
    if rank == 2:
        die()
    started = time.monotonic()
    time.sleep(0.3 * step)
    came = driver.exchange([], [(2, 1 << 21)], LONG_S)
    assert time.monotonic() - started < bound(HEARD_S)
    assert (came.kind, came.culprit, came.rank) == ("peer_lost", 2, rank)
    assert "rank 2 went away" in came.message
    is_dead(driver, came, 2)
    return "well"


@pytest.mark.parametrize("step", [0, 1])
def test_a_dead_peer(step):
    with pytest.raises(AssertionError) as why:
        run_ranks(4, body_killed, step, exit_codes=False, destroy=False)
    assert str(why.value).startswith("rank 2 gave no result")
    assert "Traceback" not in str(why.value)


def body_deadline(rank, size):
    """Rank 3 sends its head only (it waits for nobody), ranks 1 and 2 send nothing, rank 4 all."""
    driver = open_driver()
    if rank == 0:
        time.sleep(1)
        started = time.monotonic()
        came = driver.exchange([], [(p, 1 << 22) for p in (1, 2, 3, 4)], 1.5)
        assert 1.4 < time.monotonic() - started < bound(HEARD_S)
        assert came.kind == "deadline"
        assert came.message == "deadline passed: nothing (more) came from ranks 1, 2"
        assert (came.rank, came.culprit) == (0, 1)
        is_dead(driver, came, 1)
    elif rank > 2:
        driver.exchange([(0, message(rank, 0, 5 if rank == 3 else 9000))], [], LONG_S)
    dist.barrier()


def test_the_deadline_names_who_did_not_deliver():
    run_ranks(5, body_deadline)


def body_not_taken(rank, size):
    driver = open_driver()
    if rank == 0:
        came = driver.exchange([(1, message(0, 1, 8 << 20)), (2, b"x")], [], 1)
        assert came == []
        came = driver.flush(1.5)
        assert came.kind == "deadline"
        assert came.message == "deadline passed: earlier messages were not taken by rank 1"
        assert came.culprit == 1
    elif rank == 2:
        assert driver.exchange([], [(0, 9)], LONG_S) == [b"x"]
    dist.barrier()


def test_the_deadline_names_who_does_not_take():
    run_ranks(3, body_not_taken)


def body_abort(rank, size, size_bytes):
    driver = open_driver(f"abort/{size_bytes}")
    everyone(driver, rank, size, lambda *_: size_bytes)
    dist.barrier()
    if rank == 0:
        why = _core.ErrorInfo("mismatch", "told so by a test")

        told = threading.Event()

        def abort():
            time.sleep(0.5)
            told.set()
            driver.abort(why)

        thread = threading.Thread(target=abort)
        thread.start()
        started = time.monotonic()
        came = driver.exchange([], [(1, 99)], LONG_S)
        assert told.is_set()
        assert time.monotonic() - started < bound(HEARD_S)
        assert (came.kind, came.message, came.rank) == ("mismatch", "told so by a test", 0)
        driver.abort(_core.ErrorInfo("internal", "a second reason does not count"))
        is_dead(driver, came, 1)
        thread.join()
    else:
        started = time.monotonic()
        came = driver.exchange([], [(0, 99)], LONG_S)  # and peers notice
        assert time.monotonic() - started < bound(HEARD_S)
        assert (came.kind, came.culprit) == ("peer_lost", 0)
    dist.barrier()


def body_aborts(rank, size):
    for size_bytes in (10, 3 * HEAD):
        body_abort(rank, size, size_bytes)


def test_abort_from_another_thread():
    run_ranks(3, body_aborts)


class BrokenLink:
    """A link with a defect."""

    dropped = 0

    def __init__(self, why):
        self.why = why

    def exchange(self, sends, recvs, timeout_s):
        self.recvs = recvs
        raise self.why

    def abort(self):
        self.dropped += 1

    close = abort


def test_a_defect_of_the_link_is_an_error():
    for why, kind in ((MemoryError(), "capacity"), (ValueError("oh"), "internal")):
        link = BrokenLink(why)
        driver = _core.LinkDriver(0, 2, link)
        came = driver.exchange([(1, b"x")], [(1, 8)], 1)
        assert came.kind == kind
        assert link.dropped == 1
        with pytest.raises(ValueError, match="has ended"):
            link.recvs[0].allocate(3)
        is_dead(driver, came, 1)
        del driver
        assert link.dropped == 2
    assert not torch.distributed.is_initialized()
