"""The ways into zensync, side by side, for the tests of the support matrix.

A cell is a function of (rank, size) at the top of a test module; many run in one world of
processes, and each is judged by itself. Weights, inputs and gradients are small whole numbers and
sizes powers of two, so that means are exact: all bits must be those of one process that sees every
batch.
"""

import contextlib
import importlib
import traceback

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import RankError, run_ranks, same_bits
from torch.nn.parallel import DistributedDataParallel

ROWS, COLUMNS = 4096, 8
WAYS = ("attach", "tables", "hook", "all_reduce")
DDP_WAYS = ("tables", "hook")


# ---- cells in one world


def body_cells(rank, size, module, names):
    """{name: traceback or None}. After a failure of some ranks only, the rest is not run."""
    cells, results = importlib.import_module(module).CELLS, {}
    for name in names:
        error = None
        try:
            cells[name](rank, size)
        except Exception:
            error = traceback.format_exc()
        errors = [None] * size
        try:
            dist.all_gather_object(errors, error)
        except RuntimeError:
            errors[rank] = error = (
                error or f"the others did not come back:\n{traceback.format_exc()}"
            )
        results[name] = error
        if any(errors) and not all(errors):
            break
    return results


def run_cells(size, module, names, **options):
    """[{name: traceback or None} for each rank]; an AssertionError with words if the world ends."""
    try:
        options.setdefault("timeout_s", 300.0)  # many cells
        return run_ranks(size, body_cells, module, list(names), exit_codes=False, **options)
    except RankError as why:
        return str(why)


def require(results, name):
    """Fails unless cell `name` ran and passed on all ranks."""
    if isinstance(results, str):
        pytest.fail(results)
    errors = [f"rank {r}:\n{one[name]}" for r, one in enumerate(results) if one.get(name)]
    missing = [r for r, one in enumerate(results) if name not in one]
    if errors or missing:
        pytest.fail("\n".join(errors) or f"not run on ranks {missing}: one before it failed")


# ---- models and data


class Model(torch.nn.Module):
    """A table, one that a step may leave unused, and two layers."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.some = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.layer = torch.nn.Linear(COLUMNS, COLUMNS)
        self.last = torch.nn.Linear(COLUMNS, 1)

    def forward(self, ids, use_some=True):
        rows = self.table(ids)
        if use_some:
            rows = rows + self.some(ids)
        return self.last(self.layer(rows)).sum()


def whole_numbers(model, seed=3):
    """Fills the parameters with small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randint(-2, 3, one.shape, generator=generator).to(one.dtype))
    return model


def make_model(sparse=False, kind=Model):
    return whole_numbers(kind(sparse))


def ids_of(rank, step, count=32):
    generator = torch.Generator().manual_seed(977 * step + rank)
    return torch.randint(0, ROWS, (count,), generator=generator)


def batch(rank, step):
    return (ids_of(rank, step),)


# ---- ways


class Way:
    """One way into zensync around a model: `run` is called for the loss, `sync` after backward."""

    def __init__(self, kind, model, group=None, **ddp_options):
        self.kind, self.model, self.group = kind, model, group
        tables = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
        self._coo = {id(part.weight) for part in tables if part.sparse}
        if kind == "hook":
            self.run = DistributedDataParallel(model, process_group=group, **ddp_options)
            self.state = zensync.attach(self.run)
        elif kind == "tables":
            self.state = zensync.attach(model, group=group, parameters="tables")
            self.run = DistributedDataParallel(model, process_group=group, **ddp_options)
        elif kind == "attach":
            self.state, self.run = zensync.attach(model, group=group), model
        else:
            self.state, self.run = zensync.State(group), model

    def sync(self):
        """What the program itself does after backward: nothing, but for all_reduce."""
        if self.kind != "all_reduce":
            return
        for name, one in self.model.named_parameters():
            if one.requires_grad:
                if one.grad is None:
                    none = torch.zeros_like(one)
                    one.grad = none.to_sparse(1) if id(one) in self._coo else none
                zensync.all_reduce(one.grad, dist.ReduceOp.AVG, name=name, state=self.state)

    def no_sync(self):
        """Accumulation: gradients inside are added up locally."""
        if self.kind == "all_reduce":
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(self.state.no_sync())
        if self.kind == "tables":
            stack.enter_context(self.run.no_sync())
        return stack

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.state.close()


def dense(gradient):
    return None if gradient is None else gradient.to_dense()


def sign_step(model):
    """Weights move by whole numbers."""
    with torch.no_grad():
        for one in model.parameters():
            if one.grad is not None:
                one.sub_(torch.sign(one.grad.to_dense()).to(one.dtype))


def reference_step(reference, batches):
    """The gradients of one process that sees all batches, averaged."""
    reference.zero_grad()
    (sum(reference(*one) for one in batches) / len(batches)).backward()
    return {name: dense(one.grad) for name, one in reference.named_parameters()}


def require_gradients(way, wanted, what):
    """All bits are those that are wanted, on all ranks of the way's group."""
    for name, one in way.model.named_parameters():
        mine, theirs = dense(one.grad), wanted[name]
        if theirs is None:
            assert mine is None or (way.kind == "all_reduce" and not mine.any()), (what, name)
            continue
        assert mine is not None, (what, name)
        assert torch.equal(mine, theirs), (what, name)
        assert same_bits(mine, way.group), (what, name)


def check_steps(way, reference, what, steps=3, batch_of=batch, ranks=None):
    """Trains both for some steps and compares the gradients of each."""
    ranks = ranks or range(dist.get_world_size())
    for step in range(steps):
        way.model.zero_grad()
        way.run(*batch_of(dist.get_rank(), step)).backward()
        way.sync()
        wanted = reference_step(reference, [batch_of(other, step) for other in ranks])
        assert any(one is not None and one.any() for one in wanted.values()), "the control"
        require_gradients(way, wanted, (what, step))
        sign_step(way.model)
        sign_step(reference)
