"""Sums over the torch driver equal those over the native mesh, bit for bit, for every scheme."""

import os
import time

import pytest
import torch
import zensync
from ranks import run_ranks
from zensync import _torch_driver

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
SCHEMES = ("balanced", "recursive_doubling", "agsparse", "dense_ring", "dense", "auto")
SHAPES = ((30001,), (400, 64), (7, 3), (0,))  # the largest messages are longer than a head
STEPS = 2


def make(rank, dtype, shape, step):
    """One rank's tensor: the order of adding is seen in the sum. Denser at first."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 1000
    keep = torch.rand(shape[0], generator=generator) < (0.6, 0.05)[step]
    values[~keep] = 0
    return values.to(dtype)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def count_exchanges():
    """A list that grows with every exchange of the torch driver in this process."""
    calls = []
    real = _torch_driver.TorchLink.exchange

    def counted(self, sends, recvs, timeout_s):
        calls.append(sum(len(message) for _, message in sends))
        return real(self, sends, recvs, timeout_s)

    _torch_driver.TorchLink.exchange = counted
    return calls


def body_sums(rank, size):
    calls, results = count_exchanges(), {}
    for scheme in SCHEMES:
        with zensync.State(scheme=scheme, deadline_s=60) as state:
            for dtype in DTYPES:
                for shape in SHAPES:
                    for step in range(STEPS):
                        tensor = make(rank, dtype, shape, step)
                        zensync.all_reduce(tensor, state=state, name=f"{dtype} {shape}")
                        results[f"{scheme} {dtype} {shape} {step}"] = as_bytes(tensor)
            if scheme == "dense_ring":
                continue  # not for COO
            coo = make(rank, torch.float32, (900, 8), 1).to_sparse(1)
            zensync.all_reduce(coo, state=state)
            results[f"{scheme} COO"] = as_bytes(coo.indices()) + as_bytes(coo.values())
    with zensync.State(max_bytes=1 << 18, scheme="balanced") as state:  # in chunks
        for _ in range(2):
            tensor = make(rank, torch.float32, (200000,), 1)
            zensync.all_reduce(tensor, state=state)
        results["chunks"] = as_bytes(tensor)
    return results, len(calls), max(calls, default=0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_bits_are_those_of_the_native_mesh(size):
    native = run_ranks(size, body_sums, env={"ZENSYNC_TRANSPORT": ""})
    over_torch = run_ranks(size, body_sums, env={"ZENSYNC_TRANSPORT": "torch"})
    for rank in range(size):
        assert native[rank][1] == 0
        assert (over_torch[rank][1] > 100) == (size > 1)
        assert size == 1 or over_torch[rank][2] > 2 * _torch_driver.HEAD_BYTES
        for what, result in native[rank][0].items():
            assert over_torch[rank][0][what] == result == native[0][0][what], what


def body_transports_differ(rank, size):
    if rank:
        os.environ["ZENSYNC_TRANSPORT"] = "torch"
    started = time.monotonic()
    with pytest.raises(zensync.MismatchError, match="transport="):
        zensync.State(deadline_s=60)
    assert time.monotonic() - started < 15


def test_all_ranks_use_one_transport():
    run_ranks(2, body_transports_differ)
