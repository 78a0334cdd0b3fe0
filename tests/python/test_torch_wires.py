"""What the torch driver runs on beside Gloo: polled backends (a made one, whose ranks are threads),
registered ones, sub-groups; and what is said where messages do not pass."""

import re
import threading
import time
import warnings
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import zensync
from failing import bound
from ranks import run_ranks, same_bits
from test_torch_driver import HEAD, HEARD_S, SIZES, everyone, message, open_driver
from zensync import _core, _torch_compat, _torch_driver, _torch_wire

# ---- a polled backend: a transfer happens when both sides have posted, with equal counts


class MailWork:
    def __init__(self, tensor):
        self.tensor = tensor
        self.done = False
        self.error = None

    def is_completed(self):
        return self.done

    def wait(self):
        assert self.done, "polled works are waited for when they have ended"
        if self.error:
            raise RuntimeError(self.error)


class MailWorld:
    def __init__(self):
        self.lock = threading.Lock()
        self.posted = defaultdict(lambda: (deque(), deque()))  # (from, to): sends, receives
        self.gone = set()

    def post(self, pair, side, tensor):
        work = MailWork(tensor)
        with self.lock:
            sends, recvs = self.posted[pair]
            (sends, recvs)[side].append(work)
            if self.gone & set(pair):
                work.done, work.error = True, "the mail is closed"
            elif sends and recvs:
                sent, got = sends.popleft(), recvs.popleft()
                assert sent.tensor.numel() == got.tensor.numel()
                got.tensor.copy_(sent.tensor)
                sent.done = got.done = True
        return work


class MailBackend:
    """`aborts`: whether it can be aborted (many backends cannot)."""

    def __init__(self, world, rank, aborts):
        self.world, self.rank, self.aborts = world, rank, aborts

    def send(self, tensors, peer, tag):
        return self.world.post((self.rank, peer), 0, tensors[0])

    def recv(self, tensors, peer, tag):
        return self.world.post((peer, self.rank), 1, tensors[0])

    def abort(self):
        if not self.aborts:
            raise RuntimeError("mail does not support abort")
        with self.world.lock:
            self.world.gone.add(self.rank)
            for pair, sides in self.world.posted.items():
                for work in [work for side in sides if self.rank in pair for work in side]:
                    work.error, work.done = "the mail is closed", True


def on_threads(size, body, aborts=True):
    """[body(driver, rank, link)]: ranks are threads over one world."""
    world = MailWorld()

    def run(rank):
        wire = _torch_wire.OtherWire(MailBackend(world, rank, aborts), "mail")
        link = _torch_driver.TorchLink(wire, rank, size)
        return body(_core.LinkDriver(rank, size, link), rank, link)

    with ThreadPoolExecutor(size) as pool:
        return [one.result(60) for one in [pool.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_polled_messages(size):
    def body(driver, rank, link):
        link.greet(20)
        for step in range(len(SIZES)):
            mixed = [SIZES[(i + step) % len(SIZES)] for i in range(4 * size)]
            everyone(driver, rank, size, lambda a, b, mixed=mixed: mixed[3 * a + b], step)
        return driver.flush(20)

    assert on_threads(size, body) == [None] * size


def test_polled_deadline_and_lost_peer():
    gate = threading.Barrier(3)

    def body(driver, rank, link):
        if rank == 0:
            came = driver.exchange([], [(1, 9), (2, 9)], 1.0)
            assert came.message == "deadline passed: nothing (more) came from rank 2"
            gate.wait(20)
        elif rank == 1:
            assert driver.exchange([(0, b"x")], [], 20) == []
            gate.wait(20)
            came = driver.exchange([], [(0, 9)], 20)  # rank 0 has dropped its connections
            assert (came.kind, came.culprit) == ("peer_lost", 0)
        else:
            gate.wait(20)

    on_threads(3, body)


@pytest.mark.parametrize("aborts", [True, False])
def test_polled_abort(aborts):
    gate = threading.Barrier(2)

    def body(driver, rank, link):
        if rank == 1:
            gate.wait(20)
            return
        timer = threading.Timer(0.3, driver.abort, [_core.ErrorInfo("mismatch", "told so")])
        timer.start()
        started = time.monotonic()
        came = driver.exchange([], [(1, 9)], 60)
        assert time.monotonic() - started < bound(HEARD_S)
        assert (came.kind, came.message) == ("mismatch", "told so")
        timer.join()
        gate.wait(20)

    on_threads(2, body, aborts)


def test_a_message_that_no_backend_can_count():
    wire = _torch_wire.OtherWire(MailBackend(MailWorld(), 0, True), "mpi")
    assert not wire.pads
    with pytest.raises(OverflowError, match="max_bytes="):
        wire.send(1, torch.empty(2**31, dtype=torch.uint8))
    link = _torch_driver.TorchLink(wire, 0, 2)
    info = link._guarded(lambda: wire.recv(1, torch.empty(2**31, dtype=torch.uint8)))
    assert (info.kind, info.rank, info.culprit) == ("capacity", 0, 0)
    assert "max_bytes=" in info.message


class Memory:
    """A slot over memory of the test's."""

    def __init__(self, peer, size_bytes):
        self.peer = peer
        self.block = bytearray(size_bytes)

    def allocate(self, size_bytes):
        return memoryview(self.block)[:size_bytes]


def test_a_late_transfer_touches_no_message():
    """Of a backend that lets nothing go: what comes after the deadline ends up nowhere, and what is
    sent then is what was to be sent."""
    world = MailWorld()
    wires = [_torch_wire.OtherWire(MailBackend(world, rank, False), "mail") for rank in (0, 1)]
    links = [_torch_driver.TorchLink(wire, rank, 2) for rank, wire in enumerate(wires)]
    slot = Memory(1, 3 * HEAD)
    sent = bytearray(message(1, 0, 3 * HEAD))
    head = torch.zeros(HEAD, dtype=torch.uint8)  # rank 1 sends the head, then nothing for a while
    head[:8] = torch.frombuffer(bytearray((3 * HEAD).to_bytes(8, "little")), dtype=torch.uint8)
    wires[1].send(0, head)
    failure = links[0].exchange([], [slot], 0.3)
    assert failure.message == "deadline passed: nothing (more) came from rank 1"
    wires[1].send(0, torch.frombuffer(sent, dtype=torch.uint8)[HEAD - 8 :])
    assert not any(slot.block)
    failure = links[1].exchange([(0, memoryview(sent))], [Memory(0, 9)], 0.3)
    assert failure.kind == "deadline"
    sent[:] = bytes(len(sent))
    for block in (head, torch.empty(2 * HEAD + 8, dtype=torch.uint8)):
        wires[0].recv(1, block)
    assert bytes(head.tolist())[8:] + bytes(block.tolist()) == message(1, 0, 3 * HEAD)


# ---- backends that torch makes


def make_thin(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def make_thin_extended(options, _):
    return make_thin(options.store, options.group_rank, options.group_size, options.timeout)


def make_mute(store, rank, size, timeout):
    """A backend without send."""

    class Mute(dist.ProcessGroup):
        def __init__(self):
            super().__init__(rank, size)

        def getBackendName(self):  # noqa: N802
            return "mute"

    return Mute()


def register():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.Backend.register_backend("thin", make_thin, devices=["cpu"])
        dist.Backend.register_backend("thick", make_thin_extended, True, devices=["cpu"])
        dist.Backend.register_backend("mute", make_mute, devices=["cpu"])


def body_registered(rank, size):
    register()
    for name in ("thin", "thick"):
        group = dist.new_group(backend=name)
        assert _torch_compat.cpu_backend_name(group) == name
        driver = open_driver(name, group)
        for step, size_bytes in enumerate(SIZES):
            everyone(driver, rank, size, lambda *_, n=size_bytes: n, step)
        assert driver.flush(20) is None
        tensor = torch.zeros(5000)
        tensor[rank::100] = rank + 1.0
        zensync.all_reduce(tensor, group=group)
        assert tensor.sum() == 50 * sum(range(1, size + 1))
        assert same_bits(tensor)
    mute = dist.new_group(backend="mute")
    started = time.monotonic()
    with pytest.raises(zensync.UnsupportedError) as why:
        open_driver("mute", mute)
    assert re.search(
        r'"mute" does not pass messages.*: No backend.*; use the native', str(why.value)
    ), why.value
    assert time.monotonic() - started < bound(HEARD_S)
    return True


def test_registered_backends():
    run_ranks(3, body_registered, env={"ZENSYNC_TRANSPORT": "torch"})


def test_an_unknown_backend_is_refused():
    group = type("Group", (), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda _: 0)
        patch.setattr(dist, "get_world_size", lambda *_: 2)
        patch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
        patch.setattr(dist, "get_backend_config", lambda _: "cpu:unheard,cuda:nccl")
        with pytest.raises(zensync.UnsupportedError, match=r'"unheard".*native transport'):
            _torch_wire.open_wire(group, None, 1.0)
        patch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        assert _torch_compat.cpu_backend_name(group) is None


@pytest.mark.skipif(not dist.is_mpi_available(), reason="this torch was built without MPI")
def test_mpi_alone():
    dist.init_process_group("mpi", rank=0, world_size=1)
    wire = _torch_wire.open_wire(dist.group.WORLD, None, 5.0)
    assert not wire.pads
    dist.destroy_process_group()


def body_sub_group(rank, size):
    """{1, 3} of 4 over torch, while a thread of every rank uses the default group."""
    group = dist.new_group([1, 3])
    stop = torch.zeros(1)

    def busy():
        for _ in range(200):
            dist.all_reduce(stop)

    thread = threading.Thread(target=busy)
    thread.start()
    if rank in (1, 3):
        for step in range(20):
            tensor = torch.zeros(3000, 4)
            tensor[rank :: 40 + step] = rank
            expected = torch.zeros(3000, 4)
            for other in (1, 3):
                expected[other :: 40 + step] += other
            zensync.all_reduce(tensor, group=group)
            assert torch.equal(tensor, expected)
    thread.join()
    dist.barrier()


def test_a_sub_group_beside_the_default_group():
    run_ranks(4, body_sub_group, env={"ZENSYNC_TRANSPORT": "torch"})
