"""The demo's command line, for `zensync demo` and `python -m zensync.demo` alike.

Exit status: 0 if all checks hold, 1 if one doesn't (with --strict: or if a target is missed, or is
void), 2 if the demo could not run, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zensync.demo.config import MODES, NETWORKS, Options
from zensync.demo.launcher import run_demo


def main() -> int:
    """Reads the options and runs."""
    own = Options()
    parser = argparse.ArgumentParser(
        prog="zensync demo",
        description="Trains word2vec on real text over stock DDP and zensync, and compares them. "
        "Exit status: 0; 1 if a check fails, with --strict also if a target is missed or is void "
        "(other programs kept the machine busy: times don't count); 2 if it cannot run; 130 if "
        "interrupted.",
    )
    parser.add_argument("--ranks", type=int, default=own.ranks)
    parser.add_argument("--steps", type=int, default=own.steps)
    parser.add_argument("--rate", default=own.rate, help="of each link, as tc takes it")
    parser.add_argument("--network", choices=NETWORKS, default=own.network)
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE")
    parser.add_argument("--data", type=Path, help="cache folder (ZENSYNC_DATA, ./data)")
    parser.add_argument("--dim", type=int, default=own.dim, help="columns of the tables")
    parser.add_argument("--negatives", type=int, default=own.negatives)
    parser.add_argument("--tokens-per-rank", type=int, default=own.tokens_per_rank)
    parser.add_argument("--modes", default=",".join(MODES), type=lambda text: text.split(","))
    parser.add_argument("--offline", action="store_true", help="replacement text, no fetching")
    parser.add_argument("--strict", action="store_true", help="targets count for the status, too")
    parser.add_argument("--timeout-s", type=float, default=own.timeout_s)
    given = vars(parser.parse_args())
    given["modes"] = tuple(given["modes"])
    json_file = given["json_file"]
    if json_file is not None and not json_file.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {json_file.parent}")
    for name in ("ranks", "steps", "dim", "negatives", "tokens_per_rank"):
        if given[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if unknown := [mode for mode in given["modes"] if mode not in MODES]:
        parser.error(f"--modes: {', '.join(unknown)}; there are {', '.join(MODES)}")
    if len(set(given["modes"])) != len(given["modes"]):
        parser.error("--modes: each mode once")
    return run_demo(Options(**given))


if __name__ == "__main__":
    sys.exit(main())
