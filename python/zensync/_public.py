"""The public names that need torch, for the lazy import in `zensync/__init__.py`."""

from ._attach import attach
from ._clip import clip_grad_norm_
from ._fsdp import by_columns
from ._gather import all_gather_rows
from ._observe import Observation, observe
from ._scatter import reduce_scatter
from .ddp_hook import hook
from .reduce import all_reduce
from .state import State

__all__ = [
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
]
