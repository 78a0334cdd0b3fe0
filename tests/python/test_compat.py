"""Each private interface of torch in `_torch_compat.py`, and each habit of torch that zensync
relies on."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from zensync import _torch_compat as compat


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


class Plain(Joinable):
    """A Joinable that has nothing to do."""

    def __init__(self):
        super().__init__()

    def join_hook(self, **_):
        return JoinHook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def body_join(rank, size):
    first, second = Plain(), Plain()
    assert compat.place_in_join(first) == "none"
    with Join([first, second]):
        assert compat.place_in_join(first) == "first"
        assert compat.place_in_join(second) == "later"
    compat.leave_join(first)
    assert compat.place_in_join(first) == "none"
    Join([first], enable=False)
    assert compat.place_in_join(first) == "none"


def test_places_in_join():
    run_ranks(1, body_join)


def body_in_ddp(rank, size):
    seen = []
    module = torch.nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: seen.append(compat.is_in_ddp()))
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    ddp(torch.ones(1)).sum().backward()
    module(torch.ones(1))
    assert seen == [True, False]


def test_is_in_ddp():
    run_ranks(1, body_in_ddp)


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
    files = (Path(__file__), Path(__file__).with_name("test_compat_groups.py"))
    texts = "".join(file.read_text() for file in files)
    tests = set(re.findall(r"^def (test_\w+)", texts, re.MULTILINE))
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
