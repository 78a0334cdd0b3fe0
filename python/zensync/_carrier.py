"""What averages the parcels of `attach`: a State, or with ZENSYNC_DISABLE=1 the group itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import _core, _plain
from ._dense import MAX
from ._dense_bucket import call_bucket
from ._tensors import require_supported, spec_of
from ._worker import Pending, as_error
from .reduce import call_coo
from .state import State


class StateCarrier:
    """Jobs of a State, which run in the order in which they are launched."""

    def __init__(self, state: State) -> None:
        self._state = state

    def dense(
        self, parameters: list[torch.Tensor], buffer: torch.Tensor, views: list[torch.Tensor]
    ) -> Pending:
        """Averages `buffer` in place, as the hook of DDP does a bucket."""
        require_supported(buffer)
        state = self._state
        plan = state.plans.get(parameters, buffer.dtype)
        return call_bucket(state, plan, buffer, views)

    def coo(self, name: str, tensor: torch.Tensor) -> Pending:
        """Averages a COO tensor; the value is a coalesced one."""
        require_supported(tensor)
        return call_coo(self._state, tensor, name, True)

    def largest(self, name: str, vector: torch.Tensor) -> Pending:
        """The largest entries of an int32 vector over all ranks, which first agree on its name."""
        state, spec = self._state, spec_of(vector)

        def start() -> Callable[[], Any]:
            options = _core.JobOptions(name, _core.ReduceOp.SUM)
            agreed = state.agree([(_core.DenseTensor(0, spec), options, False)])

            def run() -> torch.Tensor:
                state.await_job(agreed, None)
                state.dense.all_reduce(vector, MAX, name)
                return vector

            return run

        return state.call(start, name)


class PlainCarrier:
    """The group's own all-reduces; each has ended when it is launched. Names are not compared."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def dense(
        self, parameters: list[torch.Tensor], buffer: torch.Tensor, views: list[torch.Tensor]
    ) -> Pending:
        """Averages `buffer` in place."""
        del parameters, views
        return _ended(lambda: _plain.average(self._group, buffer))

    def coo(self, name: str, tensor: torch.Tensor) -> Pending:
        """Averages a COO tensor; the value is a coalesced one."""
        del name
        return _ended(lambda: _plain.average(self._group, tensor.clone()).coalesce())

    def largest(self, name: str, vector: torch.Tensor) -> Pending:
        """The largest entries of an int32 vector over all ranks."""
        del name
        return _ended(lambda: _plain.largest(self._group, vector))


def _ended(run: Callable[[], Any]) -> Pending:
    pending = Pending(run)
    try:
        pending.end(run(), None)
    except RuntimeError as why:
        pending.end(None, as_error(why))
    return pending
