"""What `gpu/check.sh` runs: zensync on CUDA tensors beside the same on CPU tensors, bit for bit.

As many ranks over NCCL as there are GPUs (down to a power of two, so that means stay exact); with a
single one, one rank, which sends nothing, then two ranks that share it over Gloo, since NCCL takes
one rank a GPU. `--device cpu` tries this file itself where there is no GPU, with the fake back end
of the tests.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TESTS = Path(__file__).resolve().parents[1] / "tests" / "python"
_JOIN_S = 300.0
_NO_GPU = 2
ROWS, COLUMNS, STEPS = 8192, 16, 3


def bits_of(tensor: torch.Tensor) -> bytes:
    """All bits of a tensor; of a COO one its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return bits_of(tensor.indices()) + bits_of(tensor.values())
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def inputs(rank: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """(name, tensor, rows=), on the CPU."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        generator = torch.Generator().manual_seed(rank)
        for shape in ((40001,), (600, 64), (33,)):
            dense = torch.randn(shape, generator=generator, dtype=torch.float64) * 100
            dense[torch.rand(shape[0], generator=generator) < 0.9] = -0.0
            yield f"{dtype} {shape}", dense.to(dtype), None
        index = torch.randint(0, 3000, (1, 500), generator=generator)
        values = torch.randn((500, 8), generator=generator, dtype=torch.float64) * 100
        coo = torch.sparse_coo_tensor(index, values.to(dtype), (3000, 8), check_invariants=False)
        yield f"{dtype} COO", coo, None
    table = torch.zeros(5000, 16)
    table[rank::50] = rank + 0.1
    yield "rows=", table, torch.arange(rank, 5000, 50)


def sums(rank: int, device: str) -> dict[str, bytes]:
    """Bits of all sums, computed on `device`."""
    import zensync

    found = {}
    with zensync.State(scheme="balanced") as state:
        for name, tensor, rows in inputs(rank):
            there = tensor.to(device)
            work = zensync.all_reduce(there, name=name, rows=rows, state=state, async_op=True)
            assert work is not None
            work.wait()
            found[name] = bits_of(there)
    return found


class Model(torch.nn.Module):
    """Tables, one of them functional and one that a rank does not use, and dense layers."""

    def __init__(self, sparse: bool, functional: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.some = torch.nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.functional = torch.nn.Parameter(torch.empty(ROWS, COLUMNS))
        self.last = torch.nn.Linear(COLUMNS, 1)
        self.functional_is_sparse = sparse and functional  # not with DDP, which fails on it
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randint(-2, 3, one.shape, generator=generator).float())

    def forward(self, ids: torch.Tensor, uses_some: bool) -> torch.Tensor:
        rows = self.table(ids)
        if uses_some:
            rows = rows + self.some(ids)
        rows = rows + torch.nn.functional.embedding(
            ids, self.functional, sparse=self.functional_is_sparse
        )
        return self.last(rows).sum()


def train(rank: int, device: str, with_attach: bool, sparse: bool) -> dict[str, bytes]:
    """Bits of all gradients; whole numbers, so that they do not depend on the order of adding."""
    import zensync

    model = Model(sparse, with_attach).to(device)
    run: Any = model
    if with_attach:
        state = zensync.attach(model)
    else:
        used = {"device_ids": [torch.device(device).index]} if device.startswith("cuda") else {}
        run = torch.nn.parallel.DistributedDataParallel(model, **used)
        state = zensync.State(module=model)
        run.register_comm_hook(state, zensync.hook)
    found = {}
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(77 * step + rank)
        ids = torch.randint(0, ROWS, (64,), generator=generator).to(device)
        run(ids, not with_attach or rank == 0).backward()
        for name, one in model.named_parameters():
            assert one.grad is not None, name
            found[f"step {step} {name}"] = bits_of(one.grad)
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                one.sub_(torch.sign(one.grad.to_dense()))
    state.close()
    return found


CASES: dict[str, Callable[[int, str], dict[str, bytes]]] = {
    "all_reduce": sums,
    "hook": lambda rank, device: train(rank, device, False, False),
    "hook, sparse=True": lambda rank, device: train(rank, device, False, True),
    "attach": lambda rank, device: train(rank, device, True, False),
    "attach, sparse=True": lambda rank, device: train(rank, device, True, True),
}


def _rank(rank: int, size: int, folder: str, backend: str, kind: str) -> None:
    """One rank: every case on the CPU and on the device; writes what differs."""
    lines = []
    device = "cpu" if kind == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    try:
        wanted = {name: case(rank, "cpu") for name, case in CASES.items()}
        if kind == "cpu":
            sys.path.insert(0, str(_TESTS))
            import fake_device

            fake_device.install(watches=False)
        for name, case in CASES.items():
            ours = case(rank, device)
            wrong = [key for key, bits in wanted[name].items() if ours[key] != bits]
            verdict = f"differs in {len(wrong)}: {', '.join(wrong[:5])}" if wrong else "equal"
            lines.append(f"{name}: {len(ours)} tensors, {verdict}")
    except BaseException:
        lines.append("failed\n" + traceback.format_exc())
    (Path(folder) / f"{rank}.result").write_text("\n".join(lines))
    dist.destroy_process_group()


def run(size: int, backend: str, kind: str) -> bool:
    """Whether all cases are equal on all ranks; prints what rank 0, and who differs, says."""
    print(f"{size} rank(s), {backend}, tensors on {kind}")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, size, folder, backend, kind))
            for rank in range(size)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(_JOIN_S)
        good = True
        for rank, one in enumerate(ranks):
            ended = one.exitcode == 0
            if one.is_alive():
                one.kill()
            path = Path(folder) / f"{rank}.result"
            text = path.read_text() if path.exists() else "failed: no result, or it hung"
            fine = "failed" not in text and "differs" not in text
            fine = fine and ended
            good = good and fine
            if not ended:
                text += f"\nended with {one.exitcode}; None: it hung and was killed"
            if rank == 0 or not fine:
                print("\n".join(f"  rank {rank}: {line}" for line in text.splitlines()))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if parser.parse_args().device == "cpu":
        return 0 if run(2, "gloo", "cpu") else 1
    if not torch.cuda.is_available():
        print(
            f"gpu/check: torch {torch.__version__} sees no CUDA GPU here: nothing was tried. Run "
            "it on a machine with one, and a torch with CUDA."
        )
        return _NO_GPU
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # failures are zensync's to tell
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(place) for place in range(count)}
    print(f"torch {torch.__version__}, {count} GPU(s): {', '.join(sorted(names))}")
    good = True
    if dist.is_nccl_available():
        good = run(1 << (count.bit_length() - 1), "cpu:gloo,cuda:nccl", "cuda")
    else:
        print("this torch has no NCCL: skipped")
    if count == 1:
        print("a single GPU: NCCL takes one rank a GPU, so two ranks share it over Gloo")
        good = run(2, "cpu:gloo,cuda:gloo", "cuda") and good
    print("all equal" if good else "NOT equal")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
