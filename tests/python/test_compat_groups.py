"""Private interfaces of torch for groups, stores, backends and FSDP2: `_torch_compat.py`."""

import threading
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from zensync import _torch_compat as compat


def body_group(rank, size, tcp):
    world = dist.group.WORLD
    store = compat.group_store(world)
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{1 - rank}"], timedelta(seconds=20))
    sub = dist.new_group([0, 1])
    assert isinstance(compat.group_store(sub), dist.Store)
    address = compat.store_address(store)
    assert (address[0] == "127.0.0.1" and address[1] > 0) if tcp else address is None
    assert compat.group_timeout_s(world, 1.0) == 40.0
    assert compat.group_is_alive(sub)
    assert compat.group_is_alive(world)
    dist.destroy_process_group(sub)
    assert not compat.group_is_alive(sub)
    body_store(rank, store)
    body_gloo(rank, size, store)


def body_store(rank, store):
    """What StoreRendezvous promises to the core."""
    from zensync._mesh import StoreRendezvous

    own = StoreRendezvous(dist.PrefixStore(f"compat/{rank}", store))
    assert own.get("k") == b""
    started = time.monotonic()
    assert own.wait("k", 0.3) is None
    assert 0.2 < time.monotonic() - started < 5
    value = b"\x00\xffbytes"
    assert own.compare_set("k", b"", value) == value
    assert own.compare_set("k", b"", b"other") == value
    assert own.compare_set("k", value, b"next") == b"next"
    assert own.get("k") == own.wait("k", 0.3) == b"next"
    own.set("k", value)
    assert own.get("k") == value


def body_gloo(rank, size, store):
    """A wait that expires leaves the all-reduce under way; an error comes out of the next wait."""
    gloo = compat.make_gloo(dist.PrefixStore("compat/gloo", store), rank, size, 30.0)
    tensor = torch.ones(5)
    if rank:
        time.sleep(0.6)
    work = gloo.allreduce([tensor])
    slices = 0
    while not compat.wait_slice(work, 0.05):
        slices += 1
    assert slices >= 5 or rank
    assert tensor.tolist() == [size] * 5
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        tensor = torch.ones(5, dtype=dtype)
        gloo.allreduce([tensor]).wait()
        assert tensor.tolist() == [size] * 5, dtype
    held = work
    if rank:
        compat.close_gloo(gloo, rank, size)  # though `held` keeps its connections alive
        compat.close_gloo(gloo, rank, size)
        time.sleep(1)
        return
    started = time.monotonic()
    work = gloo.allreduce([tensor])
    with pytest.raises(RuntimeError, match=r"[Cc]onnection"):  # noqa: PT012
        while not compat.wait_slice(work, 0.05):
            pass
    assert time.monotonic() - started < 5
    work = gloo.allreduce([tensor])  # and what has ended can be dropped
    assert held.is_completed()
    body_close_ends_own(rank, gloo)


def body_exchanges(rank, size):
    """Parts of unequal and equal length, and what all ranks have; a wait that expires goes on."""
    store = compat.group_store(dist.group.WORLD)
    gloo = compat.make_gloo(dist.PrefixStore("compat/exchanges", store), rank, size, 30.0)
    assert compat.is_gloo(gloo)
    assert not compat.is_gloo(None)
    out = [[1, 2], [0, 3]]
    given = torch.arange(sum(out[rank])) + 10 * rank
    back = [out[0][rank], out[1][rank]]
    to = torch.empty(sum(back), dtype=torch.int64)
    if rank:
        time.sleep(0.4)
    work = compat.start_all_to_all(gloo, to, given, (back, out[rank]), 20.0)
    slices = 0
    while not compat.wait_slice(work, 0.05):
        slices += 1
    assert slices >= 3 or rank
    assert to.tolist() == ([0] if rank == 0 else [1, 2, 10, 11, 12])
    equal = torch.empty(2, dtype=torch.int64)
    compat.start_all_to_all(gloo, equal, torch.tensor([rank, 5]), ([], []), 20.0).wait()
    assert equal.tolist() == ([0, 1] if rank == 0 else [5, 5])
    whole = torch.empty(4)
    work = compat.start_all_gather(gloo, whole, torch.full((2,), float(rank)), 20.0)
    while not compat.wait_slice(work, 0.05):
        pass
    assert whole.tolist() == [0, 0, 1, 1]
    if rank:
        time.sleep(1.5)
        return
    started = time.monotonic()
    work = compat.start_all_gather(gloo, whole, torch.zeros(2), 0.3)
    with pytest.raises(RuntimeError):
        work.wait()
    assert time.monotonic() - started < 10, "its own time-out, not that of the backend"
    compat.close_backend(gloo, rank, size)
    with pytest.raises(RuntimeError):
        compat.start_all_gather(gloo, whole, torch.zeros(2), 5.0).wait()


def test_exchanges():
    run_ranks(2, body_exchanges)


def test_other_backends_are_aborted():
    for error in (None, RuntimeError("no"), NotImplementedError()):
        backend = Mock(abort=Mock(side_effect=error))
        compat.close_backend(backend, 0, 2)
        backend.abort.assert_called_once_with()


def body_close_ends_own(rank, gloo):
    """A collective that waits for others ends when the connections are closed here."""
    with pytest.raises(RuntimeError):  # noqa: PT012
        work = gloo.allreduce([torch.ones(3)])
        while not compat.wait_slice(work, 0.05):
            pass


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_group_store_and_gloo(store):
    run_ranks(2, body_group, store == "tcp", store=store)


def body_own_client(rank, size):
    store = compat.group_store(dist.group.WORLD)
    clone = compat.own_client(store)
    clone.set(f"from {rank}", "1")
    store.wait([f"from {1 - rank}"], timedelta(seconds=20))  # the same keys
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store is not clone


def test_own_client():
    assert all(run_ranks(2, body_own_client, store="tcp"))


def body_messages(rank, size):
    """What the driver relies on in Gloo: order, shorter messages, and what an expired wait does."""
    store = compat.group_store(dist.group.WORLD)
    gloo = compat.make_gloo(dist.PrefixStore("compat/messages", store), rank, size, 30.0)
    if rank == 1:
        sent = [torch.full((n,), n, dtype=torch.uint8) for n in (3, 9, 1)]
        works = [gloo.send([tensor], 0, 7) for tensor in sent]  # long before they are taken
        for work in works:
            work.wait(timedelta(seconds=20))
        block = torch.zeros(4)
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|closed"):
            gloo.recv([block], 0, 7).wait(timedelta(seconds=20))
    elif rank == 0:
        time.sleep(0.5)
        blocks = [torch.zeros(10, dtype=torch.uint8) for _ in range(3)]
        works = [gloo.recv([block], 1, 7) for block in blocks]
        expires = gloo.recv([torch.zeros(4)], 2, 7)
        time.sleep(0.5)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            expires.wait(timedelta(milliseconds=400))
        assert 0.4 <= time.monotonic() - started < 5  # never before its time
        for work in works:  # what had come by then has come
            work.wait(timedelta(milliseconds=1))
        assert [block.sum() for block in blocks] == [9, 81, 1]
        with pytest.raises(RuntimeError):
            gloo.send([torch.ones(1)], 1, 7).wait(timedelta(seconds=5))
    dist.barrier()
    body_cancelled(rank, size, store)


def body_cancelled(rank, size, store):
    """`close_gloo` ends a wait in another thread, and nothing is written afterwards."""
    gloo = compat.make_gloo(dist.PrefixStore("compat/cancelled", store), rank, size, 30.0)
    if rank == 0:
        block = torch.zeros(1000)
        work = gloo.recv([block], 1, 7)
        timer = threading.Timer(0.3, compat.close_gloo, [gloo, rank, size])
        timer.start()
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=30))
        timer.join()
    dist.barrier()
    if rank == 1:
        with pytest.raises(RuntimeError):
            gloo.send([torch.ones(1000)], 0, 7).wait(timedelta(seconds=5))
    dist.barrier()
    assert rank or not block.any()


def test_messages_over_gloo():
    run_ranks(3, body_messages)


def body_backends(rank, size):
    """Backends as torch's registry has them, in both forms, made beside the group's own."""
    asked = []

    def plain(store, rank_, size_, timeout):
        asked.append((rank_, size_, timeout))
        return dist.ProcessGroupGloo(store, rank_, size_, timeout)

    def extended(options, _):
        asked.append((options.group_rank, options.group_size, options.timeout))
        assert options.global_ranks_in_group == [0, 1]
        return dist.ProcessGroupGloo(options.store, *asked[-1])

    dist.Backend.register_backend("compat_a", plain, devices=["cpu"])
    dist.Backend.register_backend("compat_b", extended, True, devices=["cpu"])
    world = dist.group.WORLD
    assert compat.cpu_backend_name(world) == "gloo"
    assert compat.device_types(world) == {"cpu": "gloo", "cuda": "gloo"}
    assert compat.cpu_backend_name(dist.new_group(backend="compat_a")) == "compat_a"
    group = dist.new_group([0, 1])
    del asked[:]
    for name in ("compat_a", "compat_b"):
        store = dist.PrefixStore(f"compat/{name}", compat.group_store(world))
        backend = compat.make_backend(name, store, group, 12.0)
        assert asked[-1] == (dist.get_rank(group), 2, timedelta(seconds=12))
        tensor = torch.ones(3)
        compat.start_all_reduce(backend, tensor, dist.ReduceOp.SUM, 10.0).wait()
        assert tensor.tolist() == [2, 2, 2]
    with pytest.raises(LookupError, match="not built in and not registered"):
        compat.make_backend("compat_c", store, group, 12.0)


def test_backends_of_the_registry():
    run_ranks(2, body_backends)


class Recorder:
    """A custom reduce-scatter that keeps what it was given."""

    def __init__(self):
        self.seen = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.seen.append((input_tensor.clone(), op))
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.chunk(2)[dist.get_rank()] / 2)


def body_fsdp(rank, size):
    """A unit with rows that do not divide, a part cut by columns and one without a gradient."""
    model = torch.nn.Module()
    model.rows = torch.nn.Parameter(torch.ones(5, 3))
    model.columns = torch.nn.Parameter(torch.ones(3, 4))
    model.never = torch.nn.Parameter(torch.ones(7))
    weights = torch.arange(15.0).view(5, 3), torch.arange(12.0).view(3, 4) + 100
    model.forward = lambda: (model.rows * weights[0]).sum() + (model.columns * weights[1]).sum()
    mesh = init_device_mesh("cpu", (size,))
    cut = lambda one: Shard(1) if one.shape == (3, 4) else None  # noqa: E731
    fully_shard(model, mesh=mesh, shard_placement_fn=cut)
    (unit,) = compat.fsdp_units(torch.nn.Sequential(model))
    assert unit.module is model
    assert compat.is_fsdp_unit(model)
    assert not compat.is_fsdp_unit(torch.nn.Sequential(model))
    assert dist.get_world_size(unit.group) == size
    assert unit.device.type == "cpu"
    assert unit.syncs() == (True, True)
    names = {id(one): name for name, one in model.named_parameters()}
    found = [(names[id(one.sharded)], tuple(one.shape), one.dim) for one in unit.parameters]
    assert found == [("rows", (5, 3), 0), ("columns", (3, 4), 1), ("never", (7,), 0)]
    comm = Recorder()
    model.set_custom_reduce_scatter(comm)
    unit.set_syncs((False, True))
    model().backward()
    assert comm.seen == []
    model.zero_grad()
    unit.set_syncs((True, True))
    model().backward()
    ((flat, op),) = comm.seen
    assert op == dist.ReduceOp.AVG
    first, second = flat.view(2, -1) / 2  # of two backward passes
    assert first.tolist() == [*range(9), 100, 101, 104, 105, 108, 109]
    assert second.tolist() == [*range(9, 15), 0, 0, 0, 102, 103, 106, 107, 110, 111]
    assert compat.fsdp_units(torch.nn.Linear(2, 2)) == []


def test_what_an_fsdp_unit_hands_over():
    run_ranks(2, body_fsdp)
