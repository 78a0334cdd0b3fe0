"""Support matrix: `torch.compile`, by every way into zensync; aot_eager, and inductor with a break
in the graph. Bits are those of the same compiled model in one process.
"""

import pytest
import torch
from matrix_ways import DDP_WAYS, WAYS, Model, Way, check_steps, make_model, require, run_cells

SIZE = 2


class Broken(Model):
    """Its graph has a break between the tables and the layers."""

    def forward(self, ids):
        rows = self.table(ids) + self.some(ids)
        torch._dynamo.graph_break()
        return self.last(self.layer(rows)).sum()


def cell_compiled(kind, kind_of_model, **options):
    def cell(rank, size):
        with Way(kind, make_model(False, kind_of_model)) as way:
            way.run = torch.compile(way.run, **options)
            check_steps(way, make_model(False, kind_of_model), options)
        torch._dynamo.reset()

    return cell


def cell_first(rank, size):
    """`attach` of a module that was compiled before."""
    model = make_model()
    compiled = torch.compile(model, backend="aot_eager")
    with Way("attach", compiled) as way:
        reference = make_model()
        way.model, way.run = model, compiled
        check_steps(way, reference, "compiled first")
    torch._dynamo.reset()


CELLS = {f"aot_eager, {kind}": cell_compiled(kind, Model, backend="aot_eager") for kind in WAYS}
CELLS["compiled first, attach"] = cell_first
CELLS.update(
    {
        f"inductor with a break, {kind}": cell_compiled(kind, Broken, backend="inductor")
        for kind in ("attach", *DDP_WAYS)
    }
)


@pytest.fixture(scope="module")
def results():
    return run_cells(SIZE, __name__, CELLS, timeout_s=400.0)  # the compiler takes long


@pytest.mark.parametrize("cell", CELLS)
def test_compile(cell, results):
    require(results, cell)
