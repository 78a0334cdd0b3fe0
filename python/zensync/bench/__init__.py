"""`zensync bench`: measures synchronisations, kernels, wire bytes, exchanges; tables, or JSON.

Exit status: 0; 1 if a result is wrong or, with --check, a target is missed; 2 if it cannot run;
130 if interrupted.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..lab.processes import RanksError
from . import torchrun
from .config import Config
from .options import Place, check_common, make_parser, measures_parts, parse
from .result import Table, show, write_json


def main() -> int:
    """Runs what sys.argv names; the exit status."""
    try:
        return _main()
    except (OSError, RanksError) as why:  # a file that cannot be written, or read; ranks that fail
        print(f"zensync bench: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # processes and network are gone by now
        print("zensync bench: interrupted", file=sys.stderr)
        return 130


def _main() -> int:
    parser = make_parser()
    given = parser.parse_args()
    check_common(parser, given)
    if measures_parts(given):
        return _report(given, _measure(given), {})
    try:
        world = torchrun.world()
    except ValueError as why:  # every rank says so: their environments may differ
        parser.error(str(why))
    if world is not None and world[0] != 0:
        # Rank 0 says what is wrong: once is enough.
        parser.exit = _exit_silently  # type: ignore[method-assign, assignment]
    config, place = parse(parser, given, None if world is None else world[1])
    if world is not None:
        try:
            config, place = torchrun.located(config, place)
        except ValueError as why:
            parser.error(str(why))
    return _synchronise(given, config, place, world)


def _exit_silently(status: int = 0, _message: str | None = None) -> None:
    sys.exit(status)


def _measure(options: argparse.Namespace) -> list[Table]:
    tables: list[Table] = []
    if options.kernels:
        from . import kernels

        tables += kernels.run()
    if options.bytes:
        from . import volumes

        tables += volumes.run(options.data, options.offline)
    if options.exchange:
        from . import exchange

        tables += exchange.run()
    if options.failures:
        from . import failures

        tables += failures.run()
    if options.overlap:
        from . import overlap

        tables += overlap.run()
    if options.sharded:
        from . import sharded

        tables += sharded.run(options.data, options.offline)
    return tables


def _report(options: argparse.Namespace, tables: list[Table], facts: dict[str, Any]) -> int:
    if options.json != "-":
        show(tables)
    if options.json:
        write_json(options.json, tables, facts)
    missed = any(row.get("met") is False for table in tables for row in table.rows)
    return 1 if options.check and missed else 0


def _synchronise(
    options: argparse.Namespace, config: Config, place: Place, world: tuple[int, int] | None
) -> int:
    from ..errors import Error
    from ..lab.slow_net import SlowNetError
    from . import launcher, sync
    from .patterns import PatternError

    wrong: int | None = None
    rank = 0 if world is None else world[0]
    try:
        if world is None:
            rows = launcher.launch(config, place)
        else:
            rows, wrong = torchrun.run(config, place, rank)
    except (RanksError, SlowNetError, PatternError, Error) as why:
        if rank == 0 or isinstance(why, (Error, torchrun.AloneError)):
            print(f"zensync bench: {why}", file=sys.stderr)
        return 2
    if rank == 0:
        sync.report(rows, config, place, options.json)
    wrong = sum(row["wrong"] for row in rows) if wrong is None else wrong
    return 1 if wrong else 0
