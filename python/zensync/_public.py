"""The public names that need torch, for the lazy import in `zensync/__init__.py`."""

from ._attach import attach
from ._clip import clip_grad_norm_
from ._fsdp import by_columns
from ._scatter import reduce_scatter
from .ddp_hook import hook
from .reduce import all_reduce
from .state import State

__all__ = [
    "State", "all_reduce", "attach", "by_columns", "clip_grad_norm_", "hook", "reduce_scatter",
]  # fmt: skip
