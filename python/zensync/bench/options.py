"""The command line of `zensync bench`: one parser, its lists and units, and what is wrong there.

What cannot be measured is one clear line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from .._settings import is_disabled
from .config import BROKEN_SCHEME, DTYPES, NOT_SPARSE_IN_TORCH, SCHEMES, TRANSPORTS, Config
from .patterns import PATTERNS

T = TypeVar("T")

_PREFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST_BURST_KIB = 128  # a smaller bucket does not carry the rate
_BURST_KIB_PER_MBIT = 0.256
_DEFAULT_TIMEOUT_S = 3600.0
_DEFAULTS = {
    "ranks": 4, "size": "32M", "dtype": "float32", "row": 1, "parts": "auto", "pattern": "front",
    "density": "0.01", "schemes": "auto,torch_dense,torch_sparse", "iters": 7, "warmup": 2,
    "seed": 0, "hosts": None, "rate": None, "transport": None, "timeout_s": _DEFAULT_TIMEOUT_S,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a run takes place, as far as the command line or torchrun says."""

    rate: str | None
    data: str | None
    offline: bool
    timeout_s: float


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without all that could have been right."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


_PARTS = ("kernels", "bytes", "exchange", "failures", "overlap", "sharded")


def make_parser() -> argparse.ArgumentParser:
    """All options. Those of the synchronisation have no defaults here: see `_DEFAULTS`."""
    parser = _Parser(
        prog="zensync bench",
        description="Measures complete synchronisations, or with --kernels, --bytes, --exchange, "
        "--failures, --overlap, --sharded parts of them; docs/bench.md says what and how. Starts "
        "its own ranks, or runs as one of torchrun's. Exit status: 0; 1 if a result is wrong, or "
        "with --check a target is missed; 2 if it cannot run.",
    )
    sync = parser.add_argument_group("synchronisations")
    add = sync.add_argument
    add("--ranks", type=int, help="processes (4)")
    add("--rate", help="of each host's link, e.g. 200mbit: in the slow-link network (root)")
    add("--hosts", type=int, help="ranks are spread over them in blocks (one rank each)")
    add("--size", help="bytes of the dense tensor; K, M, G = 2^10, 2^20, 2^30 (32M)")
    add("--dtype", choices=DTYPES, help="(float32)")
    add("--row", type=int, metavar="N", help="elements of a row (1)")
    add("--parts", metavar="auto|C", help="units per row (auto)")
    add("--pattern", help=f"{', '.join(PATTERNS)} (front)")
    add("--density", help="share of the rows that is non-zero on a rank (0.01)")
    add("--schemes", help=f"{', '.join(SCHEMES)}, all ({_DEFAULTS['schemes']})")
    add("--iters", type=int, help="timed iterations (7)")
    add("--warmup", type=int, help="iterations before them (2)")
    add("--seed", type=int, help="of patterns and values (0)")
    add("--transport", choices=TRANSPORTS, help="what zensync's exchanges run on (native)")
    add("--timeout-s", type=float, help="for the whole run (3600)")
    parts = parser.add_argument_group("parts of synchronisations")
    parts.add_argument("--kernels", action="store_true", help="find, encode, write back, coalesce")
    parts.add_argument("--bytes", action="store_true", help="wire bytes against the ideal; balance")
    parts.add_argument("--exchange", action="store_true", help="latency of the native mesh")
    parts.add_argument("--failures", action="store_true", help="seconds until faults are named")
    parts.add_argument("--overlap", action="store_true", help="what of a step backward hides")
    parts.add_argument("--sharded", action="store_true", help="FSDP2: bytes of a table's gradient")
    parser.add_argument("--data", help="folder of the text (ZENSYNC_DATA or ./data)")
    parser.add_argument(
        "--offline", action="store_true", help="fetch nothing; say what is used instead"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write rows, machine and commit; - is stdout"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a stated target is missed")
    return parser


def check_common(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """What holds for all modes; ends the program if it does not."""
    if given.json and given.json != "-" and not Path(given.json).resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {Path(given.json).parent}")
    if given.json and given.json != "-" and Path(given.json).is_dir():
        parser.error(f"--json: {given.json} is a folder; give the name of a file")
    if is_disabled():
        parser.error("ZENSYNC_DISABLE=1 is set: what is measured would not be zensync; unset it")
    if given.timeout_s is not None and not 0 < given.timeout_s <= threading.TIMEOUT_MAX:
        parser.error(f"--timeout-s must be a number of seconds above 0, not {given.timeout_s:g}")
    if (given.data is not None or given.offline) and not _reads_text(given):
        name = "offline" if given.data is None else "data"
        parser.error(f"--{name} has no effect without --bytes, --sharded or the pattern vocab")
    if measures_parts(given):
        for name in _DEFAULTS:
            if getattr(given, name) is not None:
                parts = ", ".join(f"--{part}" for part in _PARTS)
                parser.error(f"--{name.replace('_', '-')} has no effect with {parts}")
    elif given.check:
        parser.error(f"--check needs one of --{', --'.join(_PARTS)}")


def _reads_text(given: argparse.Namespace) -> bool:
    if measures_parts(given):
        return bool(given.bytes or given.sharded)
    return "vocab" in [word.strip() for word in (given.pattern or "").split(",")]


def measures_parts(given: argparse.Namespace) -> bool:
    """Whether parts are measured in place of synchronisations."""
    return any(getattr(given, part) for part in _PARTS)


def parse(
    parser: argparse.ArgumentParser, given: argparse.Namespace, world_size: int | None
) -> tuple[Config, Place]:
    """The run that is asked for. world_size: of torchrun, else None. Ends the program if bad."""
    asked = {name: getattr(given, name) for name in _DEFAULTS}
    values = {name: _DEFAULTS[name] if got is None else got for name, got in asked.items()}
    try:
        if world_size is not None:
            _require_torchrun(asked, world_size)
            values["ranks"] = world_size
        config = _config(values)
        if (problem := config.problem()) is not None:
            raise ValueError(problem)
    except ValueError as why:
        parser.error(str(why))
    seconds = _DEFAULT_TIMEOUT_S if given.timeout_s is None else given.timeout_s
    return config, Place(given.rate, given.data, given.offline, seconds)


def _require_torchrun(asked: dict[str, object], world_size: int) -> None:
    if asked["rate"] is not None:
        raise ValueError("--rate: the slow-link network has ranks of its own; not under torchrun")
    if asked["ranks"] not in (None, world_size):
        raise ValueError(f"--ranks {asked['ranks']}, but torchrun has started {world_size}")


def _config(values: dict[str, object]) -> Config:
    ranks, dtype = values["ranks"], values["dtype"]
    assert isinstance(ranks, int)
    assert isinstance(dtype, str)
    rate = None if values["rate"] is None else parse_rate(str(values["rate"]))
    return Config(
        ranks=ranks,
        hosts=ranks if values["hosts"] is None else values["hosts"],  # type: ignore[arg-type]
        sizes=_list("size", values["size"], parse_size),
        dtype=dtype,
        row=values["row"],  # type: ignore[arg-type]
        parts=None if values["parts"] == "auto" else parse_count("parts", str(values["parts"])),
        patterns=_list("pattern", values["pattern"], _pattern),
        densities=_list("density", values["density"], _density),
        schemes=parse_schemes(str(values["schemes"]), dtype),
        iters=values["iters"],  # type: ignore[arg-type]
        warmup=values["warmup"],  # type: ignore[arg-type]
        seed=values["seed"],  # type: ignore[arg-type]
        transport=values["transport"],  # type: ignore[arg-type]
        rate_bits_per_s=rate,
        burst_bytes=0 if rate is None else burst_kib(rate) << 10,
    )


def _list(name: str, text: object, parse_one: Callable[[str], T]) -> tuple[T, ...]:
    found = [parse_one(word.strip()) for word in str(text).split(",")]
    if len(set(found)) != len(found):
        raise ValueError(f"--{name} {text}: each once")
    return tuple(found)


def parse_size(text: str) -> int:
    """Bytes: "32M" is 32·2^20."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match:
        raise ValueError(f"--size {text!r} is not a number of bytes such as 4096, 64K, 32M or 1G")
    return int(match[1]) * _PREFIXES[match[2]]


def parse_rate(text: str) -> float:
    """Bits per second: "200mbit" is 200·10^6, as tc has it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"--rate {text!r} is not a rate such as 200mbit or 1gbit")
    return float(match[1]) * _RATE_UNITS[match[2]]


def parse_burst(text: str) -> int:
    """Bytes: "128kb" is 128·2^10, as tc has it."""
    match = re.fullmatch(r"(\d+)kb", text)
    if not match:
        raise ValueError(f"the links' burst {text!r} is not a size such as 128kb")
    return int(match[1]) << 10


def burst_kib(rate_bits_per_s: float) -> int:
    """KiB that a link's token bucket holds: enough to carry the rate."""
    return max(_LEAST_BURST_KIB, round(rate_bits_per_s / 1e6 * _BURST_KIB_PER_MBIT))


def parse_count(name: str, text: str) -> int:
    """A whole number."""
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"--{name} {text!r} is not a whole number")
    return int(text)


def _pattern(text: str) -> str:
    if text not in PATTERNS:
        raise ValueError(f"no pattern is called {text!r}; there are {', '.join(PATTERNS)}")
    return text


def _density(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--density {text!r} is not a fraction such as 0.01") from None


def parse_schemes(text: str, dtype: str) -> tuple[str, ...]:
    """Names of schemes; "all" is every one that can sum `dtype`."""
    if text == "all":
        without = ("torch_sparse",) if dtype in NOT_SPARSE_IN_TORCH else ()
        return tuple(name for name in SCHEMES if name not in without)
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in (*SCHEMES, BROKEN_SCHEME):
            raise ValueError(f"no scheme is called {name!r}; there are {', '.join(SCHEMES)}")
    return _unique(names)


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError(f"--schemes {','.join(names)}: each once")
    return tuple(names)
