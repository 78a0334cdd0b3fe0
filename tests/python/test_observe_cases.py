"""`zensync.observe` where something is odd: ranks that differ, broken passes, groups that end."""

import gc
import weakref

import numpy as np
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from zensync import _notice_board, _observe

ROWS, COLUMNS = 4096, 16


def table(**options):
    return torch.nn.Embedding(ROWS, COLUMNS, **options)


def density(report, place=0):
    return report["parameters"][place]["density"] * ROWS


def uneven_body(rank, size):
    """A table that one rank alone uses; fewer steps than asked; other parameters."""
    one, two = table(sparse=True), table()
    both = torch.nn.ModuleList([one, two])
    seen = zensync.observe(both, 5, hosts=[0, 0])
    ids = torch.arange(8)
    (two(ids).sum() if rank else one(ids[:4]).sum() + two(ids).sum()).backward()
    if rank == 0:
        two(ids[:1]).sum().backward()  # rank 1 has left by then: nobody waits for it
    seen.close()
    seen.close()
    two(ids).sum().backward()
    report = seen.report()
    try:
        zensync.observe(both if rank else one, 5)
        refused = ""
    except zensync.MismatchError as why:
        refused = str(why)
    return report, refused


def test_a_rank_without_a_gradient_counts_nothing():
    for report, refused in run_ranks(2, uneven_body):
        one, two = report["parameters"]
        assert report["steps"] == 1
        assert one["density"] == 2 / ROWS
        assert two["density"] == two["union_density"] == 8 / ROWS
        assert report["now_bytes"] == 0  # one host: no card carries anything
        assert report["rate_bits_per_s"] > 0
        assert "differ" in refused


def passes_body(rank, size):
    """Accumulation, a backward that raises, the compiler, parts of what is kept."""
    found = {}
    ddp = DistributedDataParallel(table())
    seen = zensync.observe(ddp, 1)
    with ddp.no_sync():
        ddp(torch.arange(4)).sum().backward()
        ddp(torch.arange(2, 6)).sum().backward()
    found["accumulating"] = seen.steps
    ddp(torch.arange(10, 12)).sum().backward()
    found["accumulated"] = density(seen.report())

    class BrokenError(Exception):
        pass

    def fail(_):
        raise BrokenError

    module = table()
    seen = zensync.observe(module, 1)
    rows = module(torch.arange(6))
    first = module.weight.register_post_accumulate_grad_hook(fail)
    try:
        rows.sum().backward()
    except BrokenError:
        found["broken"] = seen.steps
    first.remove()
    module.weight.grad = None
    module(torch.arange(3)).sum().backward()
    found["mended"] = density(seen.report())

    module = table()
    seen = zensync.observe(module, 2)
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        compiled(torch.arange(5)).sum().backward()
    found["compiled"] = density(seen.report())

    _observe.DIARY_BYTES, _notice_board._VALUE_BYTES = 2 * ROWS // 8, 64
    module = table()
    seen = zensync.observe(module, 5)
    for step in range(5):
        module(torch.from_numpy(np.arange(step + 1))).sum().backward()
        module.weight.grad = None
    report = seen.report()
    found["every"], found["kept"] = report["every"], report["steps"]
    found["of some"] = density(report)
    return found


def test_passes_that_accumulate_break_off_or_are_compiled():
    for found in run_ranks(2, passes_body):
        assert found == {
            "accumulating": 0,
            "accumulated": 8,
            "broken": 0,
            "mended": 3,
            "compiled": 5,
            "every": 3,  # 1 and 4
            "kept": 2,
            "of some": 2.5,
        }


def leaving_body(rank, size):
    """What ends before the report: the group, the model, a rank; and what never ends."""
    found = {}
    group = dist.new_group()
    module = table()
    gone = weakref.ref(module)
    seen = zensync.observe(module, 2, group=group)
    for _ in range(2):
        module(torch.arange(7)).sum().backward()
    dist.destroy_process_group(group)
    del module, group
    gc.collect()
    found["model"], found["group"] = gone() is None, density(seen.report())

    module = table()
    late = zensync.observe(module, 2)
    module(torch.arange(7)).sum().backward()
    if rank == 0:
        report = late.report(timeout_s=0.3)
        found["late"] = report["error"], report["parameters"]
    dist.barrier()
    late.close()
    found["after"] = density(late.report())
    assert late.report()["error"] is None

    seen = zensync.observe(module, 1)
    if rank == 1:
        seen._diary.pack = lambda: b"something else"
    module(torch.arange(7)).sum().backward()
    found["corrupt"] = str(seen.report()["error"])

    seen = zensync.observe(module, 3)
    module(torch.arange(7)).sum().backward()
    if rank == 1:
        del seen  # never closed, nor asked: rank 0 learns what it saw when it is let go
        gc.collect()
    else:
        found["dropped"] = density(seen.report())

    state = zensync.attach(module)
    try:
        zensync.observe(module)
        found["attached"] = ""
    except zensync.Error as why:
        found["attached"] = str(why)
    state.close()
    return found


def test_what_ends_before_the_report():
    results = run_ranks(2, leaving_body, store="tcp")
    for rank, found in enumerate(results):
        assert found["model"]
        assert found["group"] == found["after"] == 7
        assert "attached" in found["attached"]
        assert ("diary" in found["corrupt"]) == (rank == 0)
    error, parameters = results[0]["late"]
    assert "rank 1 has not ended" in error
    assert parameters == []
    assert results[0]["dropped"] == 7


def failing_body(rank, size):
    """What goes wrong in a hook is a warning: training goes on."""
    module = table()
    seen = zensync.observe(module, 3)
    module(torch.arange(7)).sum().backward()
    if rank == 0:
        seen._diary.write = None
    module(torch.arange(7)).sum().backward()
    module(torch.arange(7)).sum().backward()
    return seen.error, seen.report()["steps"], float(module.weight.grad.sum())


def test_its_own_trouble_does_not_reach_training():
    (error, steps, total), (other_error, other_steps, other_total) = run_ranks(2, failing_body)
    assert "TypeError" in error
    assert other_error is None
    assert steps == other_steps == 1
    assert total == other_total == 3 * 7 * COLUMNS
