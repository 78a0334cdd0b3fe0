"""What zensync raises. Every error says what happened first, then which tensor and which ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ._core import ErrorInfo

__all__ = [
    "CapacityError",
    "CorruptMessageError",
    "DeadlineError",
    "Error",
    "MismatchError",
    "PeerLostError",
    "UnsupportedError",
]


class Error(RuntimeError):
    """Base of all errors of zensync.

    `rank` is the rank that saw it, `culprit` the one that caused it, `tensor` the tensor's name;
    each is None where it is not known.
    """

    kind = "internal"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        culprit: int | None = None,
        tensor: str | None = None,
    ) -> None:
        self.message = message
        self.rank = rank
        self.culprit = culprit
        self.tensor = tensor
        super().__init__(message + self._details())

    def _details(self) -> str:
        """What is known beside the message, and not said in it."""
        parts = []
        if self.tensor is not None and not _says(self.message, self.tensor):
            parts.append(f'tensor "{self.tensor}"')
        if self.rank is not None:
            parts.append(f"seen by rank {self.rank}")
        if self.culprit is not None:
            parts.append(f"caused by rank {self.culprit}")
        return f" ({', '.join(parts)})" if parts else ""


def _says(text: str, name: str) -> bool:
    """Whether `name` stands in `text`, and not as a part of another word."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


class MismatchError(Error):
    """Ranks disagree: order of calls, shape, dtype, layout or settings."""

    kind = "mismatch"


class PeerLostError(Error):
    """A rank went away."""

    kind = "peer_lost"


class DeadlineError(Error):
    """Not finished in time."""

    kind = "deadline"


class CorruptMessageError(Error):
    """Bytes from a peer fail a check."""

    kind = "corrupt_message"


class UnsupportedError(Error):
    """What was asked for cannot be done by this version; nothing was sent."""

    kind = "unsupported"


class CapacityError(Error):
    """A stated bound on memory or size does not suffice."""

    kind = "capacity"


_CLASSES: dict[str, type[Error]] = {
    cls.kind: cls
    for cls in (
        MismatchError,
        PeerLostError,
        DeadlineError,
        CorruptMessageError,
        UnsupportedError,
        CapacityError,
    )
}


def make_error(info: ErrorInfo) -> Error:
    """The exception for an error value of the core; kinds without a class become `Error`."""
    return _CLASSES.get(info.kind, Error)(
        info.message,
        rank=info.rank if info.rank >= 0 else None,
        culprit=info.culprit if info.culprit >= 0 else None,
        tensor=info.tensor or None,
    )


def raise_error(info: ErrorInfo) -> NoReturn:
    """Raises the exception for an error value of the core."""
    raise make_error(info)
