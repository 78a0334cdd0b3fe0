"""What one run of the demo is, and what its ranks hand back: plain data that goes through JSON.

`Options` is what a user asks for; `Config` is what every rank reads; `RankResult` is what every
rank writes. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zensync.lab.slow_net import ArgumentsError, LinkSpec

MODES = ("dense", "sparse", "zensync")
NETWORKS = ("auto", "slow", "loopback")
# Iteration 0 of DDP has other buckets than the rest, and connections are cold: seen, not timed.
WARM_UP_STEPS = 2
LAST_STEPS = 10  # whose mean loss is compared


@dataclass(frozen=True)
class Options:
    """A user's wishes; the defaults are the demo as README shows it."""

    ranks: int = 8
    steps: int = 20
    rate: str = "200mbit"
    network: str = "auto"
    json_file: Path | None = None
    data: Path | None = None
    dim: int = 64
    negatives: int = 64
    tokens_per_rank: int = 8192
    modes: tuple[str, ...] = MODES
    offline: bool = False
    strict: bool = False  # targets count for the exit status, too
    timeout_s: float = 900.0

    def problem(self) -> str | None:
        """What is wrong with the wishes, if anything."""
        if not 2 <= self.ranks <= 64:
            return f"ranks must be 2 to 64, not {self.ranks}"
        if self.steps <= WARM_UP_STEPS:
            return f"steps must be more than the {WARM_UP_STEPS} of the warm-up"
        if self.network not in NETWORKS:
            return f"network must be one of {', '.join(NETWORKS)}, not {self.network!r}"
        if not self.modes or set(self.modes) - set(MODES):
            return f"modes are {', '.join(MODES)}"
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            return f"--timeout-s must be a number of seconds above 0, not {self.timeout_s:g}"
        try:
            LinkSpec(rate=self.rate)
        except ArgumentsError as why:
            return str(why)
        return None


@dataclass(frozen=True)
class Config:
    """One run, as every rank reads it."""

    ranks: int
    steps: int
    modes: tuple[str, ...]
    dim: int
    negatives: int
    tokens_per_rank: int
    tokens_file: str
    vocabulary: int
    folder: str
    interface: str | None  # the card whose counters are read; None: there is none to read
    seed: int = 20250
    group_timeout_s: float = 180.0

    @property
    def table_bytes(self) -> int:
        """Both tables together, dense, in fp32."""
        return 2 * self.vocabulary * self.dim * 4


@dataclass
class ModeResult:
    """What one rank saw of one mode; a list has one entry a step."""

    loss: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    sync_s: list[float] = field(default_factory=list)
    local_s: list[float] = field(default_factory=list)  # CPU time of this process
    sent_bytes: list[int] = field(default_factory=list)
    received_bytes: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # distinct rows touched, both tables
    first_batch_after: float = 0.0  # loss of step 0's batch once all steps are done
    digest: str = ""
    equal_digests: bool = False


@dataclass
class RankResult:
    """What one rank hands back."""

    rank: int
    modes: dict[str, ModeResult]
    idle_sent_bytes: int = 0  # what the start and end of a step send by themselves
    idle_received_bytes: int = 0
    cpu_s: float = 0.0  # over the measured steps

    def save(self, folder: Path) -> None:
        """Writes the result where `load` finds it."""
        (folder / f"rank{self.rank}.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path, rank: int) -> RankResult:
        """Reads what a rank wrote."""
        fields = json.loads((folder / f"rank{rank}.json").read_text())
        fields["modes"] = {name: ModeResult(**mode) for name, mode in fields["modes"].items()}
        return RankResult(**fields)
