"""Whether a tensor on a device is sent sparse or goes through the dense all-reduce: a dozen lines,
as those of the core for CPU tensors. Only integers that were exchanged decide, on the worker and in
the order of the calls, so all ranks choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnsupportedError

TO_DENSE_ABOVE, TO_SPARSE_BELOW = 0.15, 0.10  # largest density over ranks
PROBE_EVERY = 64  # dense all-reduces of a tensor: then its non-zero rows are counted
_SCHEMES = ("auto", "balanced", "dense")


@dataclass
class Choice:
    """That of one tensor. What it says of a call follows from the calls before it."""

    is_dense: bool
    is_fixed: bool
    dense_rounds: int = 0

    def is_probe_due(self) -> bool:
        """Whether all ranks count, before this dense all-reduce."""
        return not self.is_fixed and self.dense_rounds % PROBE_EVERY == 0

    def after(self, totals: list[int] | None, units: int) -> None:
        """Behind each call. totals: non-zero units of each rank, None where they are not known."""
        self.dense_rounds = self.dense_rounds + 1 if self.is_dense else 0
        if totals is None or self.is_fixed or units == 0:
            return
        density = max(totals) / units
        self.is_dense = density >= TO_SPARSE_BELOW if self.is_dense else density > TO_DENSE_ABOVE


class Choices:
    """Those of a State, by name."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._known: dict[str, tuple[object, Choice]] = {}

    def require(self) -> None:
        """UnsupportedError if the State's scheme cannot sum tensors on devices."""
        if self._scheme not in _SCHEMES:
            raise UnsupportedError(
                f'scheme="{self._scheme}" is for CPU tensors; on devices there are "auto", '
                '"balanced" and "dense"'
            )

    def of(self, name: str, shape: object, starts_dense: bool = False) -> Choice:
        """That of a tensor; anew if its shape has changed."""
        found = self._known.get(name)
        if found is None or found[0] != shape:
            is_dense = starts_dense if self._scheme == "auto" else self._scheme == "dense"
            found = self._known[name] = (shape, Choice(is_dense, self._scheme != "auto"))
        return found[1]
