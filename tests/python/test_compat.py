"""Each private interface of torch in `_torch_compat.py`, and each habit of torch that zensync
relies on."""

import re
import sys
import time
from datetime import timedelta
from pathlib import Path

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
