"""The program that runs as one rank of the demo: sees to its own end, then trains."""

from __future__ import annotations

from zensync.demo.config import Config
from zensync.lab.processes import taken_order


def main() -> None:
    """Trains as the rank that the command line says."""
    config, rank = taken_order(Config)
    # Not earlier: loading torch takes seconds, and who loads it must already be mortal.
    from zensync.demo.trainer import train

    train(config, rank)


if __name__ == "__main__":
    main()
