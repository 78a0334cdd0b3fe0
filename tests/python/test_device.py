"""`all_reduce` of tensors on a device, with a fake back end: bits are those of the CPU's way, and
nothing runs on the device before what it depends on.
"""

import contextlib

import fake_device
import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, same_bits
from test_torch_path import DTYPES, FLOATS, bits_of, coo, make
from zensync import _device
from zensync._device_plan import PROBE_EVERY, Choice, Choices

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def tensors(rank, dtype):
    """(name, tensor, rows=): dense-stored ones of all kinds, and COO ones."""
    yield "large", make(rank, dtype, (40001,), "random"), None
    yield "rows", make(rank, dtype, (600, 64), "some"), None
    yield "small", make(rank, dtype, (33,), "minus"), None
    yield "scalar", make(rank, dtype, (), "dense"), None
    yield "none", make(rank, dtype, (0, 4), "dense"), None
    yield "turned", make(rank, dtype, (300, 80), "minus").T, None
    yield "step", make(rank, dtype, (900, 80), "random")[::3, 1::2], None
    for rows in (900, 30):  # with something outside of rows=, which stays on this rank
        table = make(rank, dtype, (rows, 40), "dense")
        ids = torch.arange(rank, rows, 7)
        outside = torch.ones(rows, dtype=torch.bool)
        outside[ids] = False
        outside[rows // 2 + 1] = False
        table[outside] = 0
        yield f"ids of {rows}", table, ids.flip(0)
    for case in range(5):
        yield f"coo {case}", coo(rank, dtype, case), None


def sums(rank, state):
    """Bits of all sums of a State; every second one is waited for later."""
    found = {}
    for dtype in DTYPES:
        for place, (name, tensor, rows) in enumerate(tensors(rank, dtype)):
            op = AVG if dtype in FLOATS and place % 3 == 0 else SUM
            key = f"{dtype} {name}"
            if place % 2:
                zensync.all_reduce(tensor, op, state=state, name=key, rows=rows)
            else:
                work = zensync.all_reduce(
                    tensor, op, state=state, name=key, rows=rows, async_op=True
                )
                assert work.wait()
                assert work.is_completed()
                assert work.result()[0] is tensor
                assert work.get_future().wait()[0] is tensor
            found[key] = bits_of(tensor)
    with torch.inference_mode():
        tensor = make(rank, torch.float32, (700, 30), "random")
        zensync.all_reduce(tensor, state=state)
        found["inference"] = bits_of(tensor)
    return found


def body_sums(rank, size):
    with zensync.State(scheme="balanced") as state:
        wanted = sums(rank, state)
        assert state.stats()["tensors"]["torch.float32 large"]["scheme"]
    runtime = fake_device.install()
    with zensync.State(scheme="balanced") as state:
        del runtime.log[:]
        ours = sums(rank, state)
        state.flush()
        log = list(runtime.log)
        stats = state.stats()
        assert stats["tensors"]["torch.float32 large"]["scheme"] == "torch_path"
        assert (stats["tensors"]["torch.float32 large"]["sent_bytes"] > 0) == (size > 1)
        assert stats["dense_bytes"] == 0
        assert size == 1 or stats["sent_bytes"] > 0
    wrong = [name for name, bits in wanted.items() if ours[name] != bits]
    marked = sum(kind == "complete" for _, _, kind, _ in log)
    return wrong, fake_device.order_problems(log), marked


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_sums_and_their_order(size):
    for wrong, problems, marked in run_ranks(size, body_sums):
        assert not wrong
        assert not problems
        assert marked > 80


@contextlib.contextmanager
def ends_early(passage):
    """The end is recorded before anything ran."""
    passage._ended = passage._asked
    with _device.runtime().using(passage._lane.stream):
        yield


BREAKS = {
    "before the caller's event": ("running", lambda one: _device.runtime().using(one._lane.stream)),
    "on stream caller": ("running", lambda one: contextlib.nullcontext()),
    "before the last event": ("ending", ends_early),
    "nobody waits": ("join", lambda one, value: None),
}


def body_broken(rank, size):
    """Problems that the check finds where a passage does less than it must."""
    runtime = fake_device.install()
    found = {}
    for words, (name, other) in BREAKS.items():
        real = getattr(_device.Passage, name)
        setattr(_device.Passage, name, other)
        with zensync.State() as state:
            del runtime.log[:]
            zensync.all_reduce(make(rank, torch.float32, (40001,), "random"), state=state)
            state.flush()
            found[words] = fake_device.order_problems(list(runtime.log))
        setattr(_device.Passage, name, real)
    return found


def test_a_wrong_order_is_seen():
    """The control of the check of the order."""
    for found in run_ranks(1, body_broken):
        for words, problems in found.items():
            assert any(words in problem for problem in problems), (words, problems)


def body_held(rank, size):
    """Memory is marked as used by the side stream before it runs, and results by the waiter's."""
    runtime = fake_device.install()
    with zensync.State() as state:
        tensor = coo(rank, torch.float32, 0)
        given = {part.data_ptr() for part in _device.parts_of(tensor)}
        del runtime.log[:]
        zensync.all_reduce(tensor, state=state)
        log = list(runtime.log)
    back = {part.data_ptr() for part in _device.parts_of(tensor)}
    before = next(place for place, one in enumerate(log) if one[2] == "collective")
    side = {one[3][1] for one in log[:before] if one[2] == "hold" and one[3][0] != "caller"}
    own = {one[3][1] for one in log[before:] if one[2] == "hold" and one[3][0] == "caller"}
    assert given <= side
    assert back <= own


def test_memory_is_held():
    run_ranks(2, body_held)


# ---- sparse or dense


def test_choice_follows_exchanged_counts():
    choice = Choices("auto").of("t", (100,))
    assert not choice.is_dense
    choice.after([15, 2], 100)
    assert not choice.is_dense, "0.15 is not above 0.15"
    choice.after([2, 16], 100)
    assert choice.is_dense
    assert choice.is_probe_due()
    choice.after([10, 1], 100)
    assert choice.is_dense, "0.10 is not below 0.10"


def full(rank, rows, dense):
    tensor = torch.zeros(rows, 4)
    tensor[:: 1 if dense else 50] = rank + 1
    return tensor


def body_adapts(rank, size):
    fake_device.install()
    outcomes = {"dense": [], "coo": []}
    with zensync.State() as state:
        for step in range(PROBE_EVERY + 4):
            for name in outcomes:
                tensor = full(rank, 5000, step < 2)
                wanted = sum(full(other, 5000, step < 2) for other in range(size))
                if name == "coo":
                    tensor = tensor.to_sparse(1)
                zensync.all_reduce(tensor, name=name, state=state)
                assert torch.equal(tensor.to_dense(), wanted), (name, step)
                assert same_bits(tensor)
                outcomes[name].append(state.stats()["tensors"][name]["outcome"] == "use_dense")
    for scheme, dense in (("balanced", False), ("dense", True)):
        with zensync.State(scheme=scheme) as state:
            for name, tensor in (("a", full(rank, 5000, True)), ("b", full(rank, 9, False))):
                zensync.all_reduce(tensor, name=name, state=state)
                assert (state.stats()["tensors"][name]["outcome"] == "use_dense") == dense
    state = zensync.State(scheme="agsparse")
    with pytest.raises(zensync.UnsupportedError, match="is for CPU tensors"):
        zensync.all_reduce(full(rank, 5000, True), state=state)
    state.close()
    return outcomes


def test_dense_and_back():
    for outcomes in run_ranks(2, body_adapts):
        for name, dense in outcomes.items():
            assert not dense[0], (name, "it starts sparse")
            assert all(dense[1 : PROBE_EVERY + 2]), (name, "dense once it was seen to be full")
            assert not any(dense[PROBE_EVERY + 2 :]), (name, "sparse again after a probe")


# ---- refused


def outside(rank):
    """The error where one rank has an index outside of the tensor."""
    with zensync.State() as state:
        index = torch.tensor([[3, 700 if rank else 5]])
        tensor = torch.sparse_coo_tensor(index, torch.ones(2, 2), (600, 2), check_invariants=False)
        with pytest.raises(zensync.Error) as failed:
            zensync.all_reduce(tensor, name="t", state=state)
    return str(type(failed.value)), failed.value.message, failed.value.culprit


def body_refused(rank, size):
    group = dist.group.WORLD
    _device.require_device(torch.device("cpu"), group)
    with pytest.raises(zensync.UnsupportedError, match="no backend for tensors on xpu"):
        _device.require_device(torch.device("xpu:0"), group)
    fake = _device.runtime()
    fake.problem = lambda: "too old"
    with pytest.raises(zensync.UnsupportedError, match="too old"):
        _device.require_device(torch.device("cuda:0"), group)
    _device.install(_device.Runtime())
    core = outside(rank)
    fake_device.install()
    return outside(rank), core


def test_what_is_refused():
    for ours, core in run_ranks(2, body_refused):
        assert ours[:2] == core[:2]
        assert ours[2] == 1, "the rank that has it is named"


def test_a_choice_that_is_fixed_stays():
    choice = Choice(is_dense=False, is_fixed=True)
    choice.after([100], 100)
    assert not choice.is_dense
    assert not choice.is_probe_due()


def test_torch_has_what_the_runtime_uses():
    """Devices cannot be had here; that these names are there can be seen."""
    for name in ("current_stream", "set_stream", "synchronize"):
        assert callable(getattr(torch.accelerator, name))
    assert callable(torch.Stream.wait_event)
    assert callable(torch.Event.record)
    assert _device.Runtime().problem() is None
    assert _device.Runtime().takes(torch.device("cuda:0"))
    assert not _device.Runtime().takes(torch.device("cpu"))


def body_disabled(rank, size):
    runtime = fake_device.install(watches=False)
    work = zensync.all_reduce(torch.ones(5), async_op=True)
    assert work.get_future().wait()[0].tolist() == [size] * 5
    model = torch.nn.Linear(3, 3)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    with zensync.State() as state:
        ddp.register_comm_hook(state, zensync.hook)
        ddp(torch.ones(2, 3)).sum().backward()
    assert [what for _, _, what, _ in runtime.log] == ["complete"] * 2
    attached = torch.nn.Embedding(6, 3, sparse=True)
    with zensync.attach(attached):
        attached(torch.tensor([rank])).sum().backward()
    assert attached.weight.grad.to_dense()[:size].eq(1 / size).all()


def test_disabled():
    """The group's own collectives; futures are such that a tensor of the device fits."""
    run_ranks(2, body_disabled, env={"ZENSYNC_DISABLE": "1"})
