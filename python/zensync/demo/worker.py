"""The program that runs as one rank of the demo: sees to its own end, then trains."""

from __future__ import annotations

import argparse
from pathlib import Path

from zensync.demo.config import Config
from zensync.lab.processes import die_with


def main() -> None:
    """Reads the run and this process' place in it from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with(args.parent)
    # Not earlier: loading torch takes seconds, and who loads it must already be mortal.
    from zensync.demo.trainer import train

    train(Config.load(args.config), args.rank)


if __name__ == "__main__":
    main()
