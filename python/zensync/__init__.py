"""Lossless sparse gradient synchronisation for PyTorch.

`import zensync` needs no torch; what belongs to PyTorch is loaded when it is first used:
`attach`, `State`, `hook` (for `ddp.register_comm_hook`), `all_reduce`, `reduce_scatter`,
`all_gather_rows`, `by_columns`, `clip_grad_norm_` and the dry run `observe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _debug, errors
from ._core import __version__
from .errors import (
    CapacityError,
    CorruptMessageError,
    DeadlineError,
    Error,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)

_debug.set_up()

if TYPE_CHECKING:
    from ._attach import attach as attach
    from ._clip import clip_grad_norm_ as clip_grad_norm_
    from ._fsdp import by_columns as by_columns
    from ._gather import all_gather_rows as all_gather_rows
    from ._observe import Observation as Observation
    from ._observe import observe as observe
    from ._scatter import reduce_scatter as reduce_scatter
    from .ddp_hook import hook as hook
    from .reduce import all_reduce as all_reduce
    from .state import State as State

__all__ = [
    "CapacityError",
    "CorruptMessageError",
    "DeadlineError",
    "Error",
    "MismatchError",
    "Observation",
    "PeerLostError",
    "State",
    "UnsupportedError",
    "__version__",
    "all_gather_rows",
    "all_reduce",
    "attach",
    "by_columns",
    "clip_grad_norm_",
    "errors",
    "hook",
    "observe",
    "reduce_scatter",
]

_NEEDS_TORCH = (
    "Observation",
    "State",
    "all_gather_rows",
    "all_reduce",
    "attach",
    "by_columns",
    "clip_grad_norm_",
    "hook",
    "observe",
    "reduce_scatter",
)


def __getattr__(name: str) -> Any:
    """Loads what needs torch at its first use; ImportError with words where torch is missing."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'zensync' has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError as why:
        raise ImportError(
            f"zensync.{name} needs PyTorch, which cannot be imported here ({why}); install torch"
        ) from why
    from . import _public

    for public in _NEEDS_TORCH:
        globals()[public] = getattr(_public, public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
