"""Support matrix, four ranks: sub-groups, groups of a DeviceMesh, and a process group that is
destroyed and made anew, by every way into zensync.
"""

import pytest
import torch
import torch.distributed as dist
from matrix_ways import WAYS, Way, batch, check_steps, dense, make_model, require, run_cells
from ranks import free_port, run_ranks, same_bits

SIZE = 4


def check_group(kind, group, members):
    """Means are those of the group's own ranks, and not those of all."""
    for sparse in (False, True):
        with Way(kind, make_model(sparse), group) as way:
            check_steps(way, make_model(), (kind, sparse), steps=2, ranks=members)
            way.model.zero_grad()
            way.run(*batch(dist.get_rank(), 5)).backward()
            way.sync()
            gradient = dense(way.model.table.weight.grad)
            assert same_bits(gradient, group)
            assert not same_bits(gradient), "the control: other groups have others"


def cell_sub_groups(kind):
    def cell(rank, size):
        for pairs in (((0, 2), (1, 3)), ((3, 0), (2, 1))):
            groups = {pair: dist.new_group(list(pair)) for pair in pairs}
            mine = next(pair for pair in pairs if rank in pair)
            check_group(kind, groups[mine], mine)

    return cell


def cell_mesh(kind):
    """Data parallel on one axis of a mesh of two."""

    def cell(rank, size):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh.get_group("dp")
        members = dist.get_process_group_ranks(group)
        assert members == [rank % 2, rank % 2 + 2]
        check_group(kind, group, members)

    return cell


CELLS = {f"sub-groups, {kind}": cell_sub_groups(kind) for kind in WAYS}
CELLS.update({f"DeviceMesh, {kind}": cell_mesh(kind) for kind in WAYS})


@pytest.fixture(scope="module")
def results():
    return run_cells(SIZE, __name__, CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_groups(cell, results):
    require(results, cell)


def body_anew(rank, size, ports):
    """The group is destroyed and made anew, twice; the same model goes on."""
    for turn, port in enumerate(ports):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )
        for kind in WAYS:
            for sparse in (False, True):
                with Way(kind, make_model(sparse)) as way:
                    check_steps(way, make_model(), (turn, kind, sparse), steps=2)


def body_outlives(rank, size, port):
    """One model, attached again in the new group; its old State is closed, its hooks are gone."""
    model, reference = make_model(True), make_model()
    with Way("attach", model) as way:
        check_steps(way, reference, "before", steps=2)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    with Way("attach", model) as way:
        check_steps(way, reference, "after", steps=2)
    assert torch.equal(model.table.weight, reference.table.weight)


def test_a_group_made_anew():
    run_ranks(2, body_anew, [free_port(), free_port()], timeout_s=300.0)
    run_ranks(2, body_outlives, free_port(), timeout_s=300.0)
