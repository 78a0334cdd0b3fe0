"""What `zensync.attach` refuses, and how it fails: in words, on all ranks, at once.

After an error a State is made anew by another `attach`.
"""

import time

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import SOON_S, die, free_port, run_ranks, same_bits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROWS, COLUMNS = 4096, 8


def make_model(sparse=True):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse), torch.nn.Linear(COLUMNS, 1)
    )


def ids_of(rank, step=0):
    generator = torch.Generator().manual_seed(77 * step + rank)
    return torch.randint(0, ROWS, (32,), generator=generator)


# ---- refused before anything is sent


def body_refused(rank, size):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (size,))
    sharded = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 1))  # test_fsdp.py has what works
    fully_shard(sharded)
    tensors = torch.nn.Linear(4, 4)
    tensors.weight = torch.nn.Parameter(
        distribute_tensor(tensors.weight.detach(), mesh, [Replicate()])
    )
    frozen = make_model().requires_grad_(False)
    flat = FullyShardedDataParallel(make_model(False), device_id=torch.device("cpu"))
    cases = [
        (sharded, {}, "no FSDP2 unit has a table"),
        (flat, {}, "FSDP1"),
        (tensors, {}, "DTensor"),
        (torch.nn.LazyLinear(3), {}, "lazy"),
        (torch.nn.Linear(2, 2, device="meta"), {}, "meta"),
        (torch.nn.Linear(2, 2).to(torch.float8_e4m3fn), {}, "dtype"),
        (frozen, {}, "no parameter"),
        (make_model(), {"parameters": "some"}, '"all", "tables"'),
        (make_model(), {"parameters": 3}, "list of parameters"),
        (make_model(), {"parameters": [torch.nn.Parameter(torch.ones(2))]}, "not the module's"),
        (torch.nn.Linear(2, 2), {"parameters": "tables"}, "no table"),
        ("text", {}, "torch.nn.Module"),
        (make_model(), {"deadline_s": -1}, "deadline_s"),
    ]
    for module, options, words in cases:
        with pytest.raises(zensync.Error, match=words):
            zensync.attach(module, **options)
    model = make_model()
    with zensync.attach(model), pytest.raises(zensync.Error, match="already"):
        zensync.attach(model)
    with pytest.raises(zensync.Error, match="attach returned"):
        zensync.State().no_sync()


def test_what_is_refused():
    run_ranks(2, body_refused)


def body_one_rank_refuses(rank, size):
    """The others are told, and do not wait until the deadline."""
    started = time.monotonic()
    with pytest.raises(zensync.Error):
        zensync.attach(make_model(), parameters="tables" if rank == 0 else "some")
    assert time.monotonic() - started < SOON_S


def body_other_parameters(rank, size):
    model = make_model()
    if rank == 1:
        model.append(torch.nn.Linear(3, 3))
    with pytest.raises(zensync.MismatchError):
        zensync.attach(model)
    other = torch.nn.Linear(2, 3 + rank)
    with pytest.raises(zensync.MismatchError, match="bias"):
        zensync.attach(other)
    with zensync.attach(make_model()):
        pass


def body_disagree(rank, size):
    body_other_parameters(rank, size)
    body_one_rank_refuses(rank, size)


def test_ranks_that_disagree():
    run_ranks(3, body_disagree)


# ---- in backward


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = make_model(False)

    def forward(self, ids, reentrant):
        return checkpoint(self.layer, self.table(ids), use_reentrant=reentrant)


def body_reentrant(rank, size):
    model = Parts()
    state = zensync.attach(model)
    model(ids_of(rank), False).sum().backward()
    with pytest.raises(zensync.UnsupportedError, match="use_reentrant=False"):
        model(ids_of(rank), True).sum().backward()
    state.close()
    csr = torch.nn.Parameter(torch.eye(300))
    holder = torch.nn.Module()
    holder.weight = csr
    holder.forward = lambda rows: torch.sparse.mm(rows, holder.weight).sum()
    state = zensync.attach(holder)
    holder(torch.eye(300)).backward()
    assert same_bits(csr.grad)
    state.close()


def body_closed(rank, size, port):
    model = make_model()
    state = zensync.attach(model)
    state.close()
    with pytest.raises(zensync.Error, match="closed"):
        model(ids_of(rank)).sum().backward()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    model.zero_grad()
    with zensync.attach(model):
        model(ids_of(rank)).sum().backward()
        assert same_bits(model[0].weight.grad)
    del state


def body_in_backward(rank, size, port):
    body_reentrant(rank, size)
    body_closed(rank, size, port)


def test_errors_in_backward():
    run_ranks(2, body_in_backward, free_port())


def body_killed(rank, size):
    model = make_model()
    zensync.attach(model)
    for step in range(2):
        model.zero_grad()
        model(ids_of(rank, step)).sum().backward()
    loss = model(ids_of(rank, 2)).sum()
    if rank == 1:
        model[0].weight.register_hook(lambda _: die())  # what comes before it was launched
    started = time.monotonic()
    with pytest.raises(zensync.PeerLostError) as caught:
        loss.backward()
    assert time.monotonic() - started < SOON_S
    assert caught.value.culprit == 1


def test_a_rank_killed_in_backward_is_named():
    from ranks import RankError

    with pytest.raises(RankError) as caught:
        run_ranks(3, body_killed, exit_codes=False, destroy=False)
    text = str(caught.value)
    assert "rank 1 gave no result" in text
    assert "rank 0" not in text, "the survivors saw what they should"
    assert "rank 2" not in text


# ---- ZENSYNC_DISABLE=1


def body_steps(rank, size):
    found = []
    for sparse in (False, True):
        model = make_model(sparse)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape).float() + rank)
        state = zensync.attach(model)
        for step in range(3):
            model.zero_grad()
            if rank == 0 or step != 1:
                model(ids_of(rank, step)).sum().backward()
            else:
                model[1](torch.ones(1, COLUMNS, requires_grad=True)).sum().backward()
            assert all(same_bits(one.grad) for one in model.parameters())
            found += [one.grad.to_dense().clone() for one in model.parameters()]
        state.close()
    ddp = DistributedDataParallel(make_model())
    state = zensync.attach(ddp)
    ddp(ids_of(rank)).sum().backward()
    found.append(ddp.module[0].weight.grad.to_dense().clone())
    state.close()
    assert state.stats()["sent_bytes"] >= 0
    return found


def test_disabled_gives_the_same():
    ours = run_ranks(2, body_steps)
    plain = run_ranks(2, body_steps, env={"ZENSYNC_DISABLE": "1"})
    for mine, theirs in zip(ours, plain, strict=True):
        assert len(mine) == 19
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
