"""`zensync bench`: measures kernels, wire bytes, small exchanges; prints tables, or JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

from .result import Table, show, write_json


def main() -> int:
    """Runs what sys.argv names. Exit status 0, or 1 with --check if a target is missed."""
    parser = argparse.ArgumentParser(prog="zensync bench", description=__doc__)
    parser.add_argument("--kernels", action="store_true", help="find, encode, write back, coalesce")
    parser.add_argument(
        "--bytes", action="store_true", help="wire bytes against the ideal; balance"
    )
    parser.add_argument("--exchange", action="store_true", help="latency of the native mesh")
    parser.add_argument("--data", help="folder of the real text (default: ZENSYNC_DATA or ./data)")
    parser.add_argument(
        "--offline", action="store_true", help="fetch nothing; say what is used instead"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write rows, machine and commit; - is stdout"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a stated target is missed")
    options = parser.parse_args()
    if not (options.kernels or options.bytes or options.exchange):
        parser.error("say what to measure: --kernels, --bytes, --exchange")
    if options.json and options.json != "-" and not Path(options.json).resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {Path(options.json).parent}")
    tables = _measure(options)
    if options.json != "-":
        show(tables)
    if options.json:
        write_json(options.json, tables)
    missed = any(row.get("met") is False for table in tables for row in table.rows)
    return 1 if options.check and missed else 0


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
    return tables
