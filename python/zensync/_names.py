"""Names of parameters: the keys under which their counts are kept, and whether they start sparse.

A parameter's name where its module is known; else the order in which it was first seen, with shape
and dtype: a bucket's number and a parameter's place in it change after the first step, so neither
can be a name.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TABLE_MIN_ROWS = 4096
TABLE_MIN_ASPECT = 16  # rows for each column


class ParameterNames:
    """Names for the parameters that hooks see; kept alive, so that ids stay theirs."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._known: dict[int, tuple[torch.nn.Parameter | torch.Tensor, str]] = {}
        self._tables: set[int] | None = None
        self._seen = 0
        if module is None:
            return
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        for name, parameter in module.named_parameters():
            self._known[id(parameter)] = (parameter, name)
        embeddings, others = embeddings_and_others(module)
        self._tables = embeddings - others  # tied to a dense layer, so dense

    def learn(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Names for parameters that came after the module was known."""
        for name, parameter in named:
            self._known.setdefault(id(parameter), (parameter, name))

    def name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter; equal on all ranks that see parameters in the same order."""
        known = self._known.get(id(parameter))
        if known is None:
            shape = ",".join(str(length) for length in parameter.shape)
            dtype = str(parameter.dtype).removeprefix("torch.")
            known = (parameter, f"parameter {self._seen} {dtype}[{shape}]")
            self._known[id(parameter)] = known
            self._seen += 1
        return known[1]

    def starts_sparse(self, parameter: torch.Tensor) -> bool:
        """Whether it is a table: by the module where it is known, else by its shape."""
        if self._tables is not None:
            return id(parameter) in self._tables
        return is_table_shape(parameter)


def embeddings_and_others(module: torch.nn.Module) -> tuple[set[int], set[int]]:
    """Ids of parameters of nn.Embedding and nn.EmbeddingBag, and of all other modules; tied ones
    are in both."""
    embeddings: set[int] = set()
    others: set[int] = set()
    for part in module.modules():
        is_embedding = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)
        found = embeddings if is_embedding else others
        found.update(id(one) for one in part.parameters(recurse=False))
    return embeddings, others


def is_table_shape(parameter: torch.Tensor) -> bool:
    """Whether its shape is that of a table: many rows, few columns."""
    if parameter.dim() != 2:
        return False
    rows, columns = parameter.shape
    return rows >= TABLE_MIN_ROWS and rows >= TABLE_MIN_ASPECT * columns
