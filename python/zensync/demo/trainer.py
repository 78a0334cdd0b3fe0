"""One rank of the demo: trains all modes in turn, step by step, and writes what it measured.

Every mode has its own copy of the model from the same seed, its own DDP and the same batches, and
the modes alternate within one set of processes, so that a loaded machine slows all of them alike.
A step is timed from a barrier until this rank's optimiser is done. Synchronisation is timed from
DDP's first call of the hook until the last bucket's future is done, waiting for slower ranks
included, by the same stamps in all modes; the stock modes run torch's own all-reduce hook.
Rank 0 writes one line of JSON a step to stdout; everything else goes to the result file.

Annotations are evaluated here (no `annotations` import): DDP compares the hook's with its types.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from zensync.demo.config import Config, ModeResult, RankResult
from zensync.demo.model import Batch, Batches, SkipGram, optimiser

Future = torch.futures.Future
Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]
_CALIBRATION_STEPS = 5


class SyncClock:
    """Stamps the first start and the last end of a step's synchronisations."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ended = 0.0

    def wrap(self, inner: Hook) -> Hook:
        """The hook, with stamps; its result and errors are passed on."""

        def hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
            if self._began is None:
                self._began = time.monotonic()
            return inner(state, bucket).then(self._end)

        return hook

    def _end(self, future: Future[torch.Tensor]) -> torch.Tensor:
        self._ended = time.monotonic()
        return future.value()

    def take(self) -> float:
        """Seconds of the step that just ended."""
        seconds = 0.0 if self._began is None else self._ended - self._began
        self._began = None
        return seconds


@dataclass
class Mode:
    """One way to synchronise, with all that it owns."""

    model: SkipGram
    ddp: DistributedDataParallel
    optimiser: torch.optim.Optimizer
    clock: SyncClock
    state: Any  # zensync.State, or None in stock modes
    result: ModeResult


def _make_mode(name: str, config: Config) -> Mode:
    model = SkipGram(config, sparse=name != "dense")
    # All ranks have drawn the same weights: no need to send them over slow links first.
    ddp = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=name == "dense")
    clock = SyncClock()
    state = None
    if name == "zensync":
        import zensync

        state = zensync.State(process_group=None, module=model)
        ddp.register_comm_hook(state, clock.wrap(zensync.hook))
    else:
        ddp.register_comm_hook(None, clock.wrap(allreduce_hook))
    return Mode(model, ddp, optimiser(model, config), clock, state, ModeResult())


class WireCounter:
    """Bytes this rank has sent and received: its card's, or zensync's own where there is none."""

    def __init__(self, interface: str | None) -> None:
        self._files: list[Path] = []
        if interface:
            folder = Path("/sys/class/net", interface, "statistics")
            self._files = [folder / "tx_bytes", folder / "rx_bytes"]

    def read(self, mode: Mode | None) -> tuple[int, int]:
        """(sent, received) so far; zeros if nobody counts."""
        if self._files:
            sent, received = (int(path.read_text()) for path in self._files)
            return sent, received
        if mode is None or mode.state is None:
            return 0, 0
        stats = mode.state.stats()
        # What went through the dense all-reduce is a ring's there and back.
        dense = 2 * (dist.get_world_size() - 1) * stats.get("dense_bytes", 0)
        ring = dense // dist.get_world_size()
        return int(stats["sent_bytes"]) + ring, int(stats["received_bytes"]) + ring


def _train(mode: Mode, batch: Batch) -> float:
    mode.optimiser.zero_grad()
    loss = mode.ddp(batch)
    loss.backward()
    mode.optimiser.step()
    return float(loss.item())


def _timed_step(mode: Mode, batch: Batch, wire: WireCounter) -> None:
    result = mode.result
    dist.barrier()
    sent, received = wire.read(mode)
    cpu = time.process_time()
    began = time.monotonic()
    result.loss.append(_train(mode, batch))
    result.step_s.append(time.monotonic() - began)
    result.local_s.append(time.process_time() - cpu)
    result.sync_s.append(mode.clock.take())
    # Once all are done, nothing of this step is still on its way.
    dist.barrier()
    sent_after, received_after = wire.read(mode)
    result.sent_bytes.append(sent_after - sent)
    result.received_bytes.append(received_after - received)
    result.rows.append(numpy.unique(batch.centres).size + numpy.unique(batch.candidates).size)


def _idle_bytes(wire: WireCounter) -> tuple[int, int]:
    """What the barriers round a step cost: the median of some steps without a step."""
    sent, received = [], []
    for _ in range(_CALIBRATION_STEPS):
        dist.barrier()
        before = wire.read(None)
        dist.barrier()
        after = wire.read(None)
        sent.append(after[0] - before[0])
        received.append(after[1] - before[1])
    return sorted(sent)[len(sent) // 2], sorted(received)[len(received) // 2]


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().data)
    return digest.hexdigest()


def _tell(rank: int, **event: Any) -> None:
    if rank == 0:
        print(json.dumps(event), flush=True)


def _measure(config: Config, rank: int) -> RankResult:
    batches = Batches(config, rank)
    modes = {name: _make_mode(name, config) for name in config.modes}
    result = RankResult(rank, {name: mode.result for name, mode in modes.items()})
    _tell(rank, event="ready")
    dist.barrier()
    wire = WireCounter(config.interface)
    result.idle_sent_bytes, result.idle_received_bytes = _idle_bytes(wire)
    cpu = sum(os.times()[:2])
    names = list(modes)
    for step in range(config.steps):
        batch = batches.make(step)
        for turn in range(len(names)):
            # Rotated, so that no mode always follows the same other one.
            name = names[(step + turn) % len(names)]
            _timed_step(modes[name], batch, wire)
            seen = modes[name].result
            _tell(rank, event="step", mode=name, loss=seen.loss[-1], step_s=seen.step_s[-1])
    result.cpu_s = sum(os.times()[:2]) - cpu
    _tell(rank, event="measured")
    first = batches.make(0)
    for mode in modes.values():
        with torch.no_grad():
            mode.result.first_batch_after = float(mode.model(first).item())
        mode.result.digest = _digest(mode.model)
        digests: list[Any] = [None] * config.ranks
        dist.all_gather_object(digests, mode.result.digest)
        mode.result.equal_digests = len(set(digests)) == 1
        if mode.state is not None:
            mode.state.close()
    return result


def train(config: Config, rank: int) -> None:
    """Runs one rank; MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME come from the launcher."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=config.group_timeout_s),
    )
    _measure(config, rank).save(Path(config.folder))
    dist.barrier()
    dist.destroy_process_group()
