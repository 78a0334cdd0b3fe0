"""Each private interface of torch in `_torch_compat.py`, and each habit of torch that zensync
relies on."""

import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
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


def test_coo_parts():
    indices, values = torch.tensor([[3, 1, 3]]), torch.ones(3, 2)
    tensor = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=False)
    assert not tensor.is_coalesced()
    assert torch.equal(compat.coo_indices(tensor), indices)
    assert torch.equal(compat.coo_values(tensor), values)


def test_copy_into_coo():
    """`copy_` gives a COO tensor the indices, values and coalesced mark of another."""
    tensor = torch.sparse_coo_tensor(torch.tensor([[3, 3]]), torch.ones(2, 2), (5, 2))
    other = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2), (5, 2), is_coalesced=True, check_invariants=False
    )
    tensor.copy_(other)
    assert tensor.is_coalesced()
    assert tensor.indices().tolist() == [[1]]


def test_keep_forever():
    thing = object()
    before = sys.getrefcount(thing)
    compat.keep_forever(thing)
    assert sys.getrefcount(thing) == before + 1


def test_end_of_a_backward():
    seen = []
    weight = torch.nn.Parameter(torch.ones(2))

    def hook(parameter):
        seen.append(compat.backward_id())
        compat.at_backward_end(lambda: seen.append("end"))

    weight.register_post_accumulate_grad_hook(hook)
    assert compat.backward_id() == -1
    for _ in range(2):
        (weight * 2).sum().backward()
        seen.append("returned")
    assert seen[1:3] == seen[4:] == ["end", "returned"]
    assert -1 < seen[0] < seen[3]


def test_what_the_end_of_a_backward_raises():
    weight = torch.nn.Parameter(torch.ones(2))

    def end():
        raise KeyError("from the end")

    weight.register_post_accumulate_grad_hook(lambda _: compat.at_backward_end(end))
    with pytest.raises(KeyError, match="from the end"):
        weight.sum().backward()
    assert weight.grad is not None


class Rooted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(2))
        self.part = torch.nn.Linear(2, 2)

    def forward(self, rows):
        return self.part(rows * self.own)


def body_ignored(rank, size):
    module = Rooted()
    compat.ignore_in_ddp(module, ["own"])
    compat.ignore_in_ddp(module, ["part.bias"])  # the first stays ignored
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(rank)
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
    values = {name: one.flatten()[0].item() for name, one in module.named_parameters()}
    everyone = [None] * size
    dist.all_gather_object(everyone, module.part.weight.grad.tolist())
    assert everyone[0] == everyone[1]
    return values


def test_what_ddp_ignores_it_leaves_alone():
    one = run_ranks(2, body_ignored)[1]
    assert one == {"own": 1.0, "part.weight": 0.0, "part.bias": 1.0}


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


def test_own_dispatch():
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    plain = torch.ones(2)
    assert not compat.has_own_dispatch(plain)
    assert not compat.has_own_dispatch(torch.nn.Parameter(plain))
    assert compat.has_own_dispatch(plain.as_subclass(Own))


def test_hidden_from_the_compiler():
    """A compiler that must trace everything refuses what is hidden; the control it traces."""

    def control(rows):
        return rows + 1

    @compat.hidden_from_compiler
    def hidden(rows):
        return rows + 1

    def compiled(function):
        return torch.compile(lambda rows: function(rows) * 2, backend="eager", fullgraph=True)

    assert compiled(control)(torch.zeros(1)).item() == 2.0
    with pytest.raises(Exception, match="disable"):
        compiled(hidden)(torch.zeros(1))


def test_the_list_of_private_interfaces_is_whole():
    text = (Path(__file__).parents[2] / "docs" / "torch_internals.md").read_text()
    listed = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    functions = re.findall(r"^def (\w+)", Path(compat.__file__).read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(functions)
    tests = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE))
    for row in listed.values():
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert tests.issuperset(named), row


def test_private_names_are_in_one_file():
    """No other file of the package touches a name of torch that starts with an underscore."""
    package = Path(compat.__file__).parent
    pattern = re.compile(
        r"\b(torch|dist|distributed_c10d|tensor|group|bucket|buffer|store)(\.\w+)*\._(?!_)[a-z]\w*"
    )
    assert pattern.search("torch.distributed._something()")
    for path in package.glob("*.py"):
        if path.name != "_torch_compat.py":
            found = pattern.search(path.read_text())
            assert not found, f"{path.name}: {found.group()}"


# ---- messages between two ranks, for the torch driver


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
