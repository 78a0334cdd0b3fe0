"""The program that runs as one rank of `zensync bench`: sees to its own end, then measures.

Rank 0 tells what `rank.measure` tells, one JSON object a line on stdout. Exit status 2 with one
line on stderr if zensync refuses; wrong results are the launcher's to judge.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

from zensync.bench.config import Config
from zensync.errors import Error
from zensync.lab.processes import taken_order


def main() -> int:
    """Measures as the rank that the command line says."""
    config, rank = taken_order(Config)
    try:
        meet(config, rank)
        take_part(config, _tell)
    except Error as why:
        print(f"zensync: {why}", file=sys.stderr)
        return 2
    return 0


def meet(config: Config, rank: int) -> None:
    """Makes the ranks' Gloo group; where the others are, torch's variables say."""
    # Not earlier: loading torch takes seconds, and who loads it must already be mortal.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    timeout = timedelta(seconds=config.group_timeout_s)
    dist.init_process_group("gloo", rank=rank, world_size=config.ranks, timeout=timeout)


def take_part(config: Config, tell: Any) -> int:
    """Measures as one rank of the group that `meet` made; the number of wrong elements."""
    import torch.distributed as dist

    from zensync.bench.rank import measure

    wrong = measure(config, tell)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def _tell(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
