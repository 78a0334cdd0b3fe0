"""One rank of three calls in another way than the others: what all of them must then raise."""

import re
import time

import torch.distributed as dist
import zensync
from ranks import SOON_S, run_ranks


def body_unlike(rank, size, unlike, cases):
    """(error, culprit, seconds) by case of `unlike(rank, case, state)`, each in its own State."""
    found = {}
    for case in cases:
        started = time.monotonic()
        with zensync.State(deadline_s=30.0) as state:
            error = None
            try:
                unlike(rank, case, state)
            except zensync.Error as why:
                error = why
            seconds = time.monotonic() - started
            last = state.last_error
            found[case] = (error, None if last is None else last.culprit, seconds)
        dist.barrier()
    return found


def require_named(unlike, cases, env):
    """All ranks raise, soon, an error of one kind that says what, and name rank 1.

    cases: by name, the class of the error and a pattern that its text has on some rank.
    """
    results = run_ranks(3, body_unlike, unlike, list(cases), env=env)
    for case, (kind, words) in cases.items():
        for rank, found in enumerate(results):
            error, culprit, seconds = found[case]
            assert type(error) is kind, f"{case}, rank {rank}: {error!r}"
            assert error.tensor, f"{case}, rank {rank}: {error}"
            assert culprit == 1, f"{case}, rank {rank}: {error}"
            assert seconds < SOON_S, case
        texts = " ".join(str(found[case][0]) for found in results)
        assert re.search(words, texts), f"{case}: {texts}"
