"""`zensync.attach` under random use: which parameters a rank uses in a step, sparse or dense, how
often it accumulates; against sums that are computed from everybody's choices.
"""

import random

import pytest
import torch
import zensync
from ranks import run_ranks, same_bits

SHAPES = [(5000, 4), (300, 3), (70000,), (), (4096, 64), (7, 5, 3), (1, 1), (300, 1)]
STEPS = 12


class Bag(torch.nn.Module):
    """The sum of chosen rows of its parameters, each row as often as it was chosen."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, uses):
        total = torch.zeros((), requires_grad=True)
        for place, (rows, sparse) in uses.items():
            part = self.parts[place]
            if sparse:
                part = torch.nn.functional.embedding(rows, part, sparse=True)
            elif part.dim() > 0:
                part = part[rows]
            total = total + part.sum()
        return total


def choices(seed, rank):
    """What a rank uses in a backward: {place: (rows, sparse)}."""
    dice = random.Random(f"{seed} {rank}")
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    uses = {}
    for place, shape in enumerate(SHAPES):
        if dice.random() < 0.5:
            continue
        count = shape[0] if shape else 1
        # Torch (2.13) itself adds the COO gradient of one row with one column up to zeros.
        least = 2 if shape[1:] == (1,) else 1
        rows = torch.randint(0, count, (dice.choice([least, 5, 40]),), generator=generator)
        uses[place] = (rows, len(shape) == 2 and dice.random() < 0.5)
    return uses


def expected(backwards, size):
    """Means, None where nobody has any, and whether all that have one have it as COO."""
    sums, coo = {}, {}
    for seed in backwards:
        for rank in range(size):
            for place, (rows, sparse) in choices(seed, rank).items():
                shape = SHAPES[place]
                whole = sums.setdefault(place, torch.zeros(shape))
                if shape:
                    whole.index_add_(0, rows, torch.ones(len(rows), *shape[1:]))
                else:
                    whole += 1
                coo[place] = coo.get(place, True) and sparse
    return {place: whole / size for place, whole in sums.items()}, coo


def body_random(rank, size, first):
    for seed in range(first, first + 3):
        model = Bag()
        state = zensync.attach(model)
        dice = random.Random(seed)
        for step in range(STEPS):
            model.zero_grad()
            backwards = [(seed, step, turn) for turn in range(dice.choice([1, 1, 1, 3]))]
            for turn in backwards[:-1]:
                with state.no_sync():
                    model(choices(turn, rank)).backward()
            model(choices(backwards[-1], rank)).backward()
            means, coo = expected(backwards, size)
            for place, parameter in enumerate(model.parts):
                where = f"seed {seed}, step {step}, parameter {place}"
                gradient = parameter.grad
                assert (gradient is None) == (place not in means), where
                if gradient is None:
                    continue
                assert torch.equal(gradient.to_dense(), means[place]), where
                assert (gradient.layout == torch.sparse_coo) == coo[place], where
                assert same_bits(gradient), where
        assert state.last_error is None
        state.close()


def body_one_row(rank, size):
    """COO with expanded values on one rank, dense-stored on the other."""
    model = Bag()
    state = zensync.attach(model)
    for step in range(3):
        model.zero_grad()
        model({7: (torch.tensor([4]), rank == 0 or step == 1)}).backward()
        wanted = torch.zeros(300, 1)
        wanted[4] = 1.0
        assert torch.equal(model.parts[7].grad.to_dense(), wanted), step
    state.close()


def test_one_row_of_one_column():
    run_ranks(2, body_one_row)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("transport", ["native", "torch"])
def test_random_use(size, transport):
    run_ranks(size, body_random, 10 * size, env={"ZENSYNC_TRANSPORT": transport})


def test_random_use_disabled():
    run_ranks(2, body_random, 0, env={"ZENSYNC_DISABLE": "1"})
