"""What one run of `zensync bench` measures: plain data that every rank reads, and its cases.

`Config` goes to the ranks as JSON. Sizes are bytes, rates bits per second. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .patterns import Case

ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "int64": 8,
}
DTYPES = tuple(ITEM_BYTES)
OUR_SCHEMES = ("auto", "balanced", "recursive_doubling", "agsparse", "dense_ring")
TORCH_SCHEMES = ("torch_dense", "torch_sparse")
SCHEMES = OUR_SCHEMES + TORCH_SCHEMES
# Spoils one element on purpose: the negative control of the comparison. Not part of `all`.
BROKEN_SCHEME = "_broken"
# What torch's Gloo refuses to add as COO tensors.
NOT_SPARSE_IN_TORCH = ("float16",)
TRANSPORTS = ("native", "torch")


@dataclass(frozen=True)
class Config:
    """One run, as every rank reads it."""

    ranks: int
    hosts: int
    sizes: tuple[int, ...]
    dtype: str
    row: int
    parts: int | None  # units per row; None: as the plan chooses
    patterns: tuple[str, ...]
    densities: tuple[float, ...]
    schemes: tuple[str, ...]
    iters: int
    warmup: int
    seed: int
    transport: str | None = None
    rate_bits_per_s: float | None = None  # of each host's card; None: loopback
    burst_bytes: int = 0  # what a card may send at once after a pause
    interface: str | None = None  # the card whose counters are read
    tokens_file: str = ""
    group_timeout_s: float = 300.0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a row (of an element if `row` is 1)."""
        return self.row * ITEM_BYTES[self.dtype]

    def cases(self) -> Iterator[tuple[int, Case]]:
        """(bytes of the dense tensor, pattern) of every case, in the order they are measured."""
        for size in self.sizes:
            for pattern in self.patterns:
                # Its density is given by its definition: one case, however many are asked for.
                densities = self.densities[:1] if pattern == "onehot" else self.densities
                for density in densities:
                    units = size // self.unit_bytes
                    tokens = self.tokens_file if pattern == "vocab" else ""
                    yield size, Case(pattern, units, density, self.ranks, self.seed, tokens)

    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        if self.ranks < 1:
            return f"--ranks must be at least 1, not {self.ranks}"
        if not 1 <= self.hosts <= self.ranks:
            return f"--hosts must be 1 to {self.ranks}, the number of ranks, not {self.hosts}"
        for name, least in (("iters", 1), ("warmup", 0), ("row", 1), ("seed", 0)):
            if getattr(self, name) < least:
                return f"--{name} must be at least {least}, not {getattr(self, name)}"
        if self.seed >= 1 << 63:
            return f"--seed must be below 2^63, not {self.seed}"
        for size in self.sizes:
            if size < 1 or size % self.unit_bytes:
                what = f"{self.row} {self.dtype}, {self.unit_bytes} bytes"
                return f"--size {size} is not a multiple of a row ({what})"
        if self.parts is not None and (self.parts < 1 or self.row % self.parts):
            return f"--parts {self.parts} does not divide the row of {self.row} elements"
        for density in self.densities:
            if not 0 < density <= 1:
                return f"--density must be above 0 and at most 1, not {density:g}"
        if "torch_sparse" in self.schemes and self.dtype in NOT_SPARSE_IN_TORCH:
            return f"torch_sparse: torch's Gloo does not add COO tensors of {self.dtype}"
        return None
