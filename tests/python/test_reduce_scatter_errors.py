"""`zensync.reduce_scatter` that goes wrong, in real processes: all ranks raise soon, and name whom.

What is wrong on one rank alone, its output for instance, must not leave the others waiting.
"""

import time

import pytest
import torch
import torch.distributed as dist
import zensync
from disagreeing import require_named
from ranks import SOON_S, RankError, die, run_ranks

AVG = dist.ReduceOp.AVG
TORCH = {"ZENSYNC_TRANSPORT": "torch"}


def unlike(rank, case, state):
    """Rank 1 calls in another way than the others."""
    odd = rank == 1
    tensor, output, options = torch.ones(12, 6), torch.empty(4, 6), {}
    if case == "shape" and odd:
        tensor, output = torch.ones(15, 6), torch.empty(5, 6)
    if case == "dtype" and odd:
        tensor, output = tensor.double(), output.double()
    if case == "layout" and odd:
        output, options = torch.empty(12, 2), {"layout": "columns"}
    if case == "op" and odd:
        options = {"op": AVG}
    if case == "name":
        options = {"name": f"table {odd}"}
    if case == "other call" and odd:
        return zensync.all_reduce(tensor, state=state, name="reduce_scatter float32[12,6] dense")
    if case == "output" and odd:
        output = torch.empty(5, 6)
    if case == "output dtype" and odd:
        output = output.double()
    if case == "unsupported" and odd:
        tensor = tensor.to(torch.int8)
    if case == "coo" and odd:
        tensor = tensor.to_sparse(1)
    if case == "columns" and odd:
        tensor, output, options = torch.ones(12, 7), torch.empty(12, 2), {"layout": "columns"}
    if case == "word" and odd:
        options = {"layout": "diagonal"}
    if case == "max" and odd:
        options = {"op": dist.ReduceOp.MAX}
    if case == "average" and odd:
        tensor, output, options = tensor.long(), output.long(), {"op": AVG}
    if case == "shared" and odd:
        output = tensor[4:8]
    return zensync.reduce_scatter(output, tensor, state=state, **options)


CASES = {
    "shape": (zensync.MismatchError, r"\[15 x 6\]"),
    "dtype": (zensync.MismatchError, "float64"),
    "layout": (zensync.MismatchError, r'reduce_scatter\(layout="columns"\)'),
    "op": (zensync.MismatchError, "AVG"),
    "name": (zensync.MismatchError, "other names"),
    "other call": (zensync.MismatchError, "all_reduce"),
    "output": (zensync.Error, r"\[5, 6\]; the part of rank 1 of 3 .* has \[4, 6\]"),
    "output dtype": (zensync.Error, "output is torch.float64, but input torch.float32"),
    "unsupported": (zensync.UnsupportedError, "int8"),
    "coo": (zensync.UnsupportedError, "COO"),
    "columns": (zensync.UnsupportedError, "7 columns cannot be cut into 3"),
    "word": (zensync.Error, "diagonal"),
    "max": (zensync.UnsupportedError, "MAX"),
    "average": (zensync.UnsupportedError, "integers"),
    "shared": (zensync.Error, "share memory"),
}


@pytest.mark.parametrize("env", [{}, TORCH], ids=["native", "torch"])
def test_ranks_that_disagree(env):
    require_named(unlike, CASES, env)


def body_alone(rank, size):
    """What is refused before anybody is told, and does not end the State."""
    with zensync.State() as state:
        for options, words in (
            ({"name": ""}, "name="),
            ({"state": 3}, "state="),
            ({"group": dist.new_group(), "state": state}, "different groups"),
        ):
            with pytest.raises(zensync.Error, match=words):
                zensync.reduce_scatter(
                    torch.empty(1), torch.ones(size), **{"state": state, **options}
                )
        output = torch.empty(1)
        zensync.reduce_scatter(output, torch.ones(size), state=state)
        assert output.item() == size
    with pytest.raises(zensync.Error, match="closed"):
        zensync.reduce_scatter(output, torch.ones(size), state=state)


def test_what_ends_no_state():
    run_ranks(2, body_alone)


def until_it_fails(state, tensor):
    while True:
        zensync.reduce_scatter(torch.empty(20, 4), tensor, state=state)


def body_killed(rank, size):
    state = zensync.State(deadline_s=30.0)
    tensor = torch.ones(60, 4)
    zensync.reduce_scatter(torch.empty(20, 4), tensor, state=state)
    if rank == 1:
        die()
    started = time.monotonic()
    with pytest.raises(zensync.PeerLostError) as raised:
        until_it_fails(state, tensor)
    assert raised.value.culprit == 1, raised.value
    assert time.monotonic() - started < SOON_S
    state.close()


@pytest.mark.parametrize("env", [{}, TORCH], ids=["native", "torch"])
def test_a_killed_rank_is_named(env):
    with pytest.raises(RankError) as raised:
        run_ranks(3, body_killed, env=env, exit_codes=False, destroy=False)
    assert str(raised.value).startswith("rank 1 gave no result"), raised.value
    assert len(str(raised.value).splitlines()) == 1, raised.value
