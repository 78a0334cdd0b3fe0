"""The program that runs as one rank of the demo: sees to its own end, then trains."""

from __future__ import annotations

from zensync.demo.config import Config
from zensync.lab.processes import started_rank


def main() -> None:
    """One rank of a run, as its launcher started it."""
    place, rank = started_rank()
    # Not earlier: loading torch takes seconds, and who loads it must already be mortal.
    from zensync.demo.trainer import train

    train(Config.load(place), rank)


if __name__ == "__main__":
    main()
