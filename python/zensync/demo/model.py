"""What the demo trains: word2vec's skip-gram with two untied tables and a sampled softmax.

A rank's batch is `tokens_per_rank` tokens in whole sequences of the shuffled text; each predicts a
neighbour among that neighbour and a few negatives shared by the batch. Two cores carry eight such
ranks: a step costs each about 10 ms, so that synchronisation is what is measured. Every mode gets
the same batches: they depend on the step, the rank and the seed alone.

Methods: Mikolov et al. 2013 (skip-gram, weighting of frequent words, negatives ~ count^0.75);
Jean et al. 2015 (sampled softmax, logits corrected by the log of the sampling rate).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import nn

from zensync.demo.config import Config

_SEQUENCE = 256
_WINDOW = 2
_FREQUENT = 1e-5  # words rarer than this count in full
# Mean losses make tiny gradients for tables; per token of the global batch this is word2vec's.
_RATE_PER_TOKEN = 0.006


@dataclass(frozen=True)
class Batch:
    """One rank's tokens of one step (B tokens, K negatives)."""

    centres: torch.Tensor  # int64 [B]
    candidates: torch.Tensor  # int64 [B + K]: the neighbours, then the negatives
    log_rates: torch.Tensor  # fp32 [B + K]: log of the rate at which a candidate is sampled
    weights: torch.Tensor  # fp32 [B], sum 1


class SkipGram(nn.Module):
    """Two tables, `inputs` and `outputs`, of vocabulary × dim in fp32."""

    def __init__(self, config: Config, *, sparse: bool) -> None:
        super().__init__()
        size = (config.vocabulary, config.dim)
        generator = torch.Generator().manual_seed(config.seed)
        first = torch.randn(size, generator=generator).mul_(0.5)
        # The second table starts at zero, as word2vec's does.
        self.inputs = nn.Embedding(*size, sparse=sparse, _weight=first)
        self.outputs = nn.Embedding(*size, sparse=sparse, _weight=torch.zeros(size))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted mean of the sampled cross entropy."""
        n_centres = batch.centres.numel()
        hidden = self.inputs(batch.centres)
        # One look-up for all candidates, so that the table's gradient is made once.
        rows = self.outputs(batch.candidates)
        right = (hidden * rows[:n_centres]).sum(1) - batch.log_rates[:n_centres]
        wrong = hidden @ rows[n_centres:].T - batch.log_rates[n_centres:]
        every = torch.cat([right[:, None], wrong], 1)
        loss: torch.Tensor = (batch.weights * (torch.logsumexp(every, 1) - right)).sum()
        return loss


def optimiser(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Plain SGD: it takes sparse gradients and has no state to sweep over."""
    rate = _RATE_PER_TOKEN * config.tokens_per_rank * config.ranks
    return torch.optim.SGD(model.parameters(), lr=rate)


class Batches:
    """Cuts the text into batches; a text that is too short starts over."""

    def __init__(self, config: Config, rank: int) -> None:
        tokens = numpy.load(config.tokens_file, mmap_mode="r")
        self._length = min(_SEQUENCE, config.tokens_per_rank, tokens.size)
        whole = tokens.size // self._length * self._length
        self._sequences = tokens[:whole].reshape(-1, self._length)
        self._order = numpy.random.default_rng(config.seed).permutation(len(self._sequences))
        counts = numpy.bincount(tokens, minlength=config.vocabulary).astype(numpy.float64)
        rates = counts**0.75
        self._cumulated = numpy.cumsum(rates / rates.sum())
        shares = counts / counts.sum()
        with numpy.errstate(divide="ignore"):
            self._log_rates = numpy.log(rates / rates.sum()).astype(numpy.float32)
            self._weights = numpy.minimum(1.0, numpy.sqrt(_FREQUENT / shares))
        self._config = config
        self._rank = rank

    def make(self, step: int) -> Batch:
        """This rank's batch of a step."""
        config = self._config
        each = config.tokens_per_rank // self._length
        first = (step * config.ranks + self._rank) * each
        which = self._order[numpy.arange(first, first + each) % len(self._order)]
        rng = numpy.random.default_rng((config.seed, step, self._rank))
        block = self._sequences[which].astype(numpy.int64)
        here = numpy.arange(self._length)
        there = here + rng.integers(1, _WINDOW + 1, block.shape)
        # At a sequence's end the neighbour is taken from the left.
        there = numpy.where(there < self._length, there, 2 * here - there)
        neighbours = numpy.take_along_axis(block, there, 1).ravel()
        centres = block.ravel()
        # Negatives at equal distances along the distribution: far less noise than independent
        # ones. Zero-count tokens have no share of it and are never drawn.
        places = (numpy.arange(config.negatives) + rng.random()) / config.negatives
        negatives = numpy.searchsorted(self._cumulated, places * self._cumulated[-1], "right")
        candidates = numpy.concatenate([neighbours, negatives])
        weights = self._weights[centres] * self._weights[neighbours]
        return Batch(
            torch.from_numpy(centres),
            torch.from_numpy(candidates),
            torch.from_numpy(self._log_rates[candidates]),
            torch.from_numpy((weights / weights.sum()).astype(numpy.float32)),
        )
