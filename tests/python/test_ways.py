"""What carries exchanges: what was asked for, or the next way with a warning."""

import logging

import pytest
import torch
import torch.distributed as dist
import zensync
from ranks import run_ranks, same_bits

NOBODYS = "198.51.100.1"  # reserved for documentation: no interface has it, nothing is sent there


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def listen():
    handler, logger = Lines(), logging.getLogger("zensync")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler.lines


def works(state, rank, size):
    tensor = torch.zeros(500, 4)
    tensor[rank::50] = rank + 1
    zensync.all_reduce(tensor, state=state)
    assert tensor.sum() == sum(40.0 * (other + 1) for other in range(size))
    full = torch.ones(5000, 4)
    for _ in range(3):
        zensync.all_reduce(full, state=state)
    assert (full == float(size**3)).all()
    assert same_bits(tensor)


def body_unreachable(rank, size, wanted):
    """One rank's address cannot be used: all ranks go on together, and say so."""
    lines = listen()
    tuning = {"address": NOBODYS} if rank == 1 else None
    if wanted == "native":
        with pytest.raises(zensync.UnsupportedError, match=NOBODYS):
            zensync.State(_tuning=tuning)
        assert not lines
        return
    state = zensync.State(_tuning=tuning)
    assert state.transport == "torch"
    warnings = [text for level, text in lines if level == "WARNING"]
    assert len(warnings) == (2 if wanted == "" else 1), lines
    assert all(NOBODYS in text and "trying the torch transport" in text for text in warnings)
    assert "without heartbeats" in lines[-1][1], lines
    works(state, rank, size)
    state.close()
    if wanted == "":  # nothing of it is left: the next State is made as if nothing had been
        state = zensync.State()
        assert state.transport == "native"
        works(state, rank, size)
        state.close()


@pytest.mark.parametrize("wanted", ["", "native", "torch"])
def test_an_address_that_cannot_be_used(wanted):
    run_ranks(3, body_unreachable, wanted, env={"ZENSYNC_TRANSPORT": wanted})


def body_mismatch_without_connections(rank, size):
    """Faults are settled through the store where there are no connections."""
    state = zensync.State(deadline_s=5, _tuning={"address": NOBODYS} if rank == 1 else None)
    tensor = torch.ones(10, 4 if rank == 2 else 2)
    with pytest.raises(zensync.MismatchError) as caught:
        zensync.all_reduce(tensor, name="t", state=state)
    culprits = [None] * size
    dist.all_gather_object(culprits, caught.value.culprit)
    assert len(set(culprits)) == 1, culprits
    state.close()


def test_a_mismatch_without_connections():
    run_ranks(3, body_mismatch_without_connections, env={"ZENSYNC_TRANSPORT": "torch"})


def body_wishes(rank, size):
    lines = listen()
    state = zensync.State()
    assert state.transport == ("torch" if size == 2 else "none")
    assert [level for level, _ in lines] == ["INFO"], lines
    state.close()


@pytest.mark.parametrize("size", [1, 2])
def test_what_was_asked_for_is_said_once(size):
    run_ranks(size, body_wishes, env={"ZENSYNC_TRANSPORT": "torch"})
