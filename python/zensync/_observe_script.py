"""`zensync observe script.py …`: runs a script unmodified and observes what it trains.

Each DistributedDataParallel is observed from when it is made; if there is none by the first step of
an optimizer, the module that holds that one's parameters. The script's stdout stays its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._observe import Observation, observe
from ._observe_text import as_text
from .bench.options import parse_rate
from .bench.torchrun import world
from .errors import Error

_CANNOT_RUN, _NOTHING_SEEN = 2, 3
_WAIT_S, _WAIT_FAILED_S = 60.0, 5.0  # for other ranks, once the script has ended here


class _Watch:
    """Observes what is trained: each DDP, or else the first module that an optimizer steps."""

    def __init__(self, steps: int, rate: str | None, hosts: list[str] | None) -> None:
        self._steps, self._rate, self._hosts = steps, rate, hosts
        self._is_looking = True
        self._seen: list[Observation] = []
        self.problem = ""

    @property
    def found(self) -> list[Observation]:
        """Those that saw a backward."""
        return [one for one in self._seen if one.steps]

    def close(self) -> None:
        """Tells the other ranks what was seen, for their reports."""
        for one in self._seen:
            one.close()
            self.problem = self.problem or one.error or ""

    def take(self, module: torch.nn.Module | None) -> None:
        """Observes `module`. Never raises: the script goes on."""
        if module is None:
            return
        self._is_looking = False
        try:
            self._seen.append(observe(module, self._steps, rate=self._rate, hosts=self._hosts))
        except Exception as why:
            self.problem = str(why)

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before each step of any optimizer."""
        if self._is_looking:
            self._is_looking = False  # a search that fails would fail again, and takes long
            try:
                found = _owner_of(optimizer)
            except Exception as why:
                self.problem = str(why)
                return
            self._is_looking = found is None
            self.take(found)


def _owner_of(optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
    """The smallest module that has most of the optimizer's parameters."""
    wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
    best, best_key = None, (0, 0, 0)
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.nn.Module):
            continue
        try:
            own = {id(one) for one in thing.parameters()}
            key = (len(own & wanted), -len(own), sum(1 for _ in thing.modules()))
        except AttributeError:  # its __init__ has not run
            continue
        if key[0] and key > best_key:
            best, best_key = thing, key
    return best


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    plain: Callable[..., None] = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def made(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        watch.take(self)

    handle = register_optimizer_step_pre_hook(watch.step)
    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = plain  # type: ignore[method-assign]
        handle.remove()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zensync observe",
        description="Runs a training script as it is and says what zensync would change. The "
        "script's stdout stays its own; the table goes to stderr, of rank 0.",
        epilog="Exit status: the script's, if that is not 0; 2 if it cannot run or be observed; "
        "3 if nothing was trained.",
    )
    parser.add_argument("--steps", type=int, default=20, help="backward passes (20)")
    parser.add_argument("--rate", help="of each host's link, e.g. 200mbit; default: timed")
    parser.add_argument("--hosts", help="a name per rank, equal where ranks share a card: a,a,b,b")
    parser.add_argument("--json", metavar="FILE", help="where the figures go; - is stdout")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


def main() -> int:
    """Runs what sys.argv names; the exit status."""
    given = _parser().parse_args()
    problem = _problem(given)
    if problem:
        return _say(problem, _CANNOT_RUN)
    hosts = None if given.hosts is None else given.hosts.split(",")
    watch = _Watch(given.steps, given.rate, hosts)
    with _watching(watch):
        status = _run(given.script, given.args)
    return _tell(watch, given.json, status)


def _problem(given: argparse.Namespace) -> str:
    if given.steps < 1:
        return f"--steps {given.steps} must be at least 1"
    if not Path(given.script).is_file():
        return f"{given.script} is not a file"
    if given.json not in (None, "-") and not Path(given.json).absolute().parent.is_dir():
        return f"--json {given.json}: there is no such folder"
    try:
        if given.rate is not None:
            parse_rate(given.rate)
    except ValueError as why:
        return str(why)
    return ""


def _run(script: str, args: list[str]) -> int:
    """Runs it as `python script args…` would; its exit status."""
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _tell(watch: _Watch, json_file: str | None, status: int) -> int:
    watch.close()
    found = watch.found
    if not found:
        if watch.problem:
            return _say(f"cannot observe this script: {watch.problem}", status or _CANNOT_RUN)
        return _say("nothing was trained: no backward was seen", status or _NOTHING_SEEN)
    if found[0].rank:
        return status
    sys.stdout.flush()
    try:
        reports = [one.report(_WAIT_FAILED_S if status else _WAIT_S) for one in found]
        if json_file != "-":
            for report in reports:
                print(as_text(report), file=sys.stderr, flush=True)
        if json_file is not None:
            text = json.dumps({"observations": reports}, indent=2) + "\n"
            sys.stdout.write(text) if json_file == "-" else Path(json_file).write_text(text)
    except (OSError, Error, RuntimeError) as why:
        return _say(str(why), status or _CANNOT_RUN)
    if any(not report["steps"] for report in reports):
        return status or _CANNOT_RUN
    return status


def _say(text: str, status: int) -> int:
    try:
        place = world()
    except ValueError:
        place = None
    if place is None or place[0] == 0:
        print(f"zensync observe: {text}", file=sys.stderr)
    return status
