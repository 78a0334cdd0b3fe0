"""One rank of `zensync bench`: measures all cases, its schemes interleaved; rank 0 makes the rows.

Every iteration runs each scheme once, from a fresh copy of the input and a common start to the
rank's own end; then, untimed, every element of the result is compared with the exact sum. After
the warm-up comes one iteration whose bytes are counted and whose time is not. The process group is
the caller's; making this one rank's measurements is a collective call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ..lab.load import busy_s, machine_id, own_s
from .config import Config
from .figures import CaseResult, CpuWindow, Measured, foreign_load, rows_of
from .inputs import Workload, make_workload
from .schemes import Scheme, open_scheme
from .start import Starter, card_bytes, is_leader

Tell = Callable[[dict[str, Any]], None]


def measure(config: Config, tell: Tell) -> int:
    """Elements that were wrong, over all cases, schemes and ranks; the same on every rank.

    `tell` is called on rank 0 only: {"event": "step"} after each pass, {"event": "row", …}.
    """
    rank = dist.get_rank()
    wrong = 0
    with ExitStack() as stack:
        starter = Starter(config)
        stack.callback(starter.close)
        schemes: dict[str, Scheme] = {}
        for name in config.schemes:
            schemes[name] = open_scheme(name, config)
            stack.callback(schemes[name].close)
        for size, case in config.cases():
            if rank == 0:
                tell({"event": "case", "what": f"{case.pattern} {case.density:g}, {size} bytes"})
            workload = make_workload(config, size, case, rank)
            run = _CaseRun(config, workload, schemes, starter, tell if rank == 0 else _be_silent)
            result = _gather(size, workload, run.run())
            wrong += sum(one.wrong for each in result.by_scheme.values() for one in each)
            if rank == 0:
                for row in rows_of(result, config):
                    row["transport"] = schemes[row["scheme"]].transport
                    tell({"event": "row", "row": row})
        dist.barrier()  # no State leaves while a slower rank still uses its own
    return wrong


def _be_silent(_event: dict[str, Any]) -> None:
    pass


class _CaseRun:
    """The iterations of one case on one rank."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        schemes: dict[str, Scheme],
        starter: Starter,
        tell: Tell,
    ) -> None:
        self._config, self._workload, self._schemes = config, workload, schemes
        self._starter, self._tell = starter, tell
        self._found = {name: Measured([], 0, 0, 0, 0) for name in schemes}
        self._counts_card = bool(config.interface) and is_leader(dist.get_rank(), config)

    def run(self) -> tuple[dict[str, Measured], CpuWindow]:
        """What this rank measured, and what its machine did meanwhile."""
        for _ in range(self._config.warmup):
            self._each_once(0, self._pass)
        idle = self._idle_bytes()
        self._each_once(0, lambda name: self._counted_pass(name, idle))
        gc.collect()
        gc.disable()
        began, busy, own = time.monotonic(), busy_s(), own_s()
        for iteration in range(self._config.iters):
            self._each_once(iteration, self._timed_pass)
        elapsed = time.monotonic() - began
        window = CpuWindow(machine_id(), elapsed, busy_s() - busy, own_s() - own)
        gc.enable()
        return self._found, window

    def _each_once(self, turn: int, one_pass: Callable[[str], object]) -> None:
        """Rotated, so that no scheme always follows the same other one."""
        names = list(self._schemes)
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            one_pass(name)
            self._tell({"event": "step", "scheme": name})

    def _pass(self, name: str) -> tuple[float, float]:
        """Seconds from the common start to this rank's own start, and to its end."""
        scheme = self._schemes[name]
        scheme.prepare(self._workload)
        common = self._starter.wait()
        began = time.monotonic()
        scheme.run()
        ended = time.monotonic()
        dist.barrier()  # comparing would take cores from ranks that are not done
        self._found[name].wrong += self._workload.wrong(scheme.result())
        return began - common, ended - common

    def _timed_pass(self, name: str) -> None:
        late_s, seconds = self._pass(name)
        found = self._found[name]
        found.seconds.append(seconds)
        found.late_s = max(found.late_s, late_s)

    def _counted_pass(self, name: str, idle: tuple[int, int]) -> None:
        scheme, found = self._schemes[name], self._found[name]
        scheme.prepare(self._workload)
        dist.barrier()
        before, card = scheme.counts(), self._card()
        dist.barrier()
        scheme.run()
        dist.barrier()
        moved = [after - own for after, own in zip(self._card(), card, strict=True)]
        sent, received, dense = (a - b for a, b in zip(scheme.counts(), before, strict=True))
        found.wrong += self._workload.wrong(scheme.result())
        if self._counts_card:
            sent, received = max(0, moved[0] - idle[0]), max(0, moved[1] - idle[1])
        found.sent_bytes, found.received_bytes, found.dense_bytes = sent, received, dense

    def _card(self) -> tuple[int, int]:
        if not self._counts_card or self._config.interface is None:
            return 0, 0
        return card_bytes(self._config.interface)

    def _idle_bytes(self) -> tuple[int, int]:
        """What the barriers of a counted pass cost by themselves."""
        dist.barrier()
        before = self._card()
        dist.barrier()
        dist.barrier()
        after = self._card()
        return after[0] - before[0], after[1] - before[1]


def _gather(
    size: int, workload: Workload, own: tuple[dict[str, Measured], CpuWindow]
) -> CaseResult:
    """What all ranks measured, on every rank."""
    mine = ({name: asdict(found) for name, found in own[0].items()}, asdict(own[1]))
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    by_scheme = {name: [Measured(**found[name]) for found, _ in theirs] for name in own[0]}
    load = foreign_load([CpuWindow(**window) for _, window in theirs])
    return CaseResult(size, workload.case, workload.facts, by_scheme, load)
