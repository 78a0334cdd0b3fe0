"""`zensync.observe`, a dry run: what a module's gradients hold, and what zensync would change.

Hooks read local gradients and change nothing. At the end of each backward ranks exchange which
rows are non-zero, over connections of their own. What goes wrong there ends the observation, with
a warning, and not the training.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _torch_compat
from ._arguments import host_names, require_group
from ._bucket import SMALL_BYTES
from ._mesh import lock_of
from ._observed import COO, DENSE, Record, Step, Subject, card_share, link_ms, row_of, totals
from ._tensors import DTYPES, spec_of
from .bench.figures import ring_bytes
from .bench.options import parse_rate
from .errors import Error, MismatchError, UnsupportedError

_TIMEOUT_S = 300.0  # for a rank that is late; torch's own training would wait longer
_PROBE_BYTES = 4 << 20
_HEAD = 1  # bytes before a bitmap: the layout
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_logger = logging.getLogger("zensync")


def observe(
    model: torch.nn.Module,
    steps: int = 20,
    *,
    group: dist.ProcessGroup | None = None,
    rate: str | None = None,
    hosts: Sequence[str | int] | None = None,
) -> Observation:
    """Records what the gradients of `model` hold in its next `steps` backward passes.

    A collective call if torch.distributed is initialised; all ranks then make as many passes.
    Nothing is changed: gradients, losses and what is sent for them are those without it.

    model: a plain module, or a DDP (`group` is its own). rate: of each host's link, "200mbit" or
    "1gbit"; None: timed now, in one exchange. hosts: one entry per rank, equal for ranks that
    share a network card; None: each has its own.
    Errors: Error for arguments; UnsupportedError for parameters without plain memory;
    MismatchError if parameters differ between ranks.
    """
    if not isinstance(model, torch.nn.Module):
        raise Error(f"a torch.nn.Module is needed, not {type(model).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise Error(f"steps= must be a whole number above 0, not {steps!r}")
    try:
        bits = None if rate is None else parse_rate(rate)
    except (ValueError, AttributeError) as why:
        raise Error(f"rate={rate!r} is not a rate such as 200mbit or 1gbit") from why
    if isinstance(model, DistributedDataParallel):
        if group is not None and group is not model.process_group:
            raise Error("group= is for a plain module; a DDP has its own")
        group, model = model.process_group, model.module
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not named:
        raise UnsupportedError("the module has no parameter that requires a gradient")
    subjects = _subjects(model, named)
    alone = group is None and not (dist.is_available() and dist.is_initialized())
    used = None if alone else require_group(group)
    size = 1 if used is None else dist.get_world_size(used)
    names = host_names(hosts, size) or [f"host {rank}" for rank in range(size)]
    link = _Link(used)
    link.require_equal(f"{steps} {bits} {names} {subjects}")
    if bits is None:
        bits = link.measure()
    return Observation(named, subjects, link, (steps, bits, names))


def _subjects(model: torch.nn.Module, named: Sequence[tuple[str, Any]]) -> list[Subject]:
    tables: set[int] = set()
    others: set[int] = set()
    for part in model.modules():
        is_table = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)
        (tables if is_table else others).update(id(p) for p in part.parameters(recurse=False))
    found = []
    for name, parameter in named:
        if torch.nn.parameter.is_lazy(parameter):
            raise UnsupportedError(f"{name} is lazy and has no values yet; run the module once")
        if parameter.is_meta or _torch_compat.has_own_dispatch(parameter):
            raise UnsupportedError(f"{name} ({type(parameter).__name__}) holds no plain memory")
        rows, row_bytes = _rows_of(parameter)
        dtype = str(parameter.dtype).removeprefix("torch.")
        is_tied = id(parameter) in tables & others
        shape = tuple(parameter.shape)
        refusal = _refusal(parameter)
        found.append(Subject(name, shape, dtype, rows, row_bytes, is_tied, refusal))
    return found


def _rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    spec = spec_of(tensor, torch.float32)
    return spec.rows, spec.row_elems * tensor.element_size()


def _refusal(parameter: torch.Tensor) -> str:
    if parameter.numel() * parameter.element_size() < SMALL_BYTES:
        return "small"
    if parameter.dtype not in DTYPES:
        return "of a dtype that is not summed sparse"
    return "" if parameter.is_contiguous() else "not contiguous"


def find_rows(gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """bool [rows]: which have a bit set besides signs; of a COO gradient: which it has."""
    found = torch.zeros(rows, dtype=torch.bool)
    if gradient.layout == torch.sparse_coo:
        found[_torch_compat.coo_indices(gradient)[0].cpu()] = True
        return found
    if gradient.numel() == 0:
        return found
    plain = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    whole = plain.detach().contiguous().reshape(rows, -1)
    bits = whole.view(_INTEGERS[whole.element_size()])
    return (bits << 1).ne(0).any(dim=1).cpu()


class _Link:
    """The connections of one observation; none where there is one rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = 0, 1
        self._gloo: Any = None
        if group is None or dist.get_world_size(group) == 1:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = min(_torch_compat.group_timeout_s(group, _TIMEOUT_S), _TIMEOUT_S)
        with lock_of(group):
            number = _made[group] = _made.get(group, 0) + 1
            base = _torch_compat.own_client(_torch_compat.group_store(group))
            store = dist.PrefixStore(f"zensync/observe/{number}", base)
            self._gloo = _torch_compat.make_gloo(store, self.rank, self.size, self._timeout_s)

    def most(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each element over ranks, in place."""
        if self._gloo is not None:
            most = dist.ReduceOp.MAX
            _torch_compat.start_all_reduce(self._gloo, tensor, most, self._timeout_s).wait()
        return tensor

    def require_equal(self, text: str) -> None:
        """MismatchError unless all ranks say the same."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        most = self.most(torch.tensor([digest, -digest]))
        if int(most[0]) != -int(most[1]):
            self.close()
            raise MismatchError("arguments or parameters of observe() differ between ranks")

    def measure(self) -> float | None:
        """Bits per second, of the slowest rank, in one ring all-reduce; None for one rank."""
        if self.size == 1:
            return None
        tensor = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        self.most(tensor[:1024].clone())
        start = time.monotonic()
        self.most(tensor)
        taken = self.most(torch.tensor([time.monotonic() - start], dtype=torch.float64))
        return ring_bytes(_PROBE_BYTES, self.size) * 8 / max(float(taken), 1e-9)

    def finish(self) -> None:
        """Closes the connections, once all ranks have what they wait for."""
        if self._gloo is not None:
            try:
                self.most(torch.zeros(1, dtype=torch.uint8))
            except RuntimeError as why:  # all figures are there
                _logger.debug("zensync: the end of an observation: %s", why)
        self.close()

    def close(self) -> None:
        """Closes the connections at once."""
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            _torch_compat.close_gloo(gloo, self.rank, self.size)


class Observation:
    """Statistics of the backward passes so far, equal on all ranks. `observe` makes it."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        subjects: Sequence[Subject],
        link: _Link,
        asked: tuple[int, float | None, list[str]],
    ) -> None:
        self.rank, self.size = link.rank, link.size
        self.error: str | None = None  # why it ended early
        self._steps, self._rate, self._hosts = asked
        self._subjects, self._link = subjects, link
        self._records = [Record(subject) for subject in subjects]
        self._offsets = np.cumsum([0, *(_HEAD + -(-s.rows // 8) for s in subjects)])
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        self._backward = -1
        self._report: tuple[int, dict[str, Any]] | None = None
        own = weakref.ref(self)
        self._handles = [
            parameter.register_hook(_hook(own, place)) for place, (_, parameter) in enumerate(named)
        ]

    @property
    def steps(self) -> int:
        """Backward passes recorded."""
        return self._records[0].steps

    @property
    def is_done(self) -> bool:
        """Whether it records no more."""
        return not self._handles

    def _saw(self, place: int, gradient: torch.Tensor) -> None:
        """In a backward: what one parameter's local gradient holds."""
        if self.is_done:
            return
        if _torch_compat.backward_id() != self._backward:
            self._backward = _torch_compat.backward_id()
            self._seen.clear()
            _torch_compat.at_backward_end(self._after_others)
        try:
            is_coo = gradient.layout == torch.sparse_coo
            rows = find_rows(gradient, self._subjects[place].rows)
            self._seen[place] = (rows, COO if is_coo else DENSE)
        except Exception as why:
            self._give_up(why)

    def _after_others(self) -> None:
        """What DDP does at the end of a backward comes first."""
        _torch_compat.at_backward_end(self._end)

    def _end(self) -> None:
        if self.is_done:
            return
        try:
            self._exchange()
            if self.steps >= self._steps:
                self._unhook()
                self._link.finish()
        except Exception as why:
            self._give_up(why)

    def _exchange(self) -> None:
        """One MAX all-reduce: each rank's bitmaps in a row of their own."""
        shared = np.zeros((self.size, self._offsets[-1]), dtype=np.uint8)
        for place, (rows, layout) in self._seen.items():
            begin, end = self._offsets[place : place + 2]
            mine = shared[self.rank, begin:end]
            mine[0] = layout
            mine[_HEAD:] = np.packbits(rows.numpy())
        self._seen.clear()
        self._link.most(torch.from_numpy(shared))
        for place, record in enumerate(self._records):
            record.add(self._step_of(shared[:, self._offsets[place] : self._offsets[place + 1]]))

    def _step_of(self, parts: Any) -> Step:
        sets = [np.flatnonzero(np.unpackbits(part[_HEAD:])).astype(np.int64) for part in parts]
        return Step(sets, [int(part[0]) for part in parts])

    def _give_up(self, why: Exception) -> None:
        self.error = f"{type(why).__name__}: {why}"
        _logger.warning("zensync: observe ends after %d steps: %s", self.steps, self.error)
        self.close()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """Removes the hooks, and closes the connections. Idempotent; figures stay."""
        self._unhook()
        self._link.close()

    def report(self) -> dict[str, Any]:
        """All figures, as plain data for JSON: means over the steps recorded."""
        if self._report is None or self._report[0] != self.steps:
            self._report = self.steps, self._make_report()
        return self._report[1]

    def _make_report(self) -> dict[str, Any]:
        share = card_share(self._hosts, self.size)
        recorded = [record for record in self._records if record.steps]
        rows = [row_of(record, self.size, share) for record in recorded]
        for row in rows:
            row["now_ms"] = link_ms(row["now_bytes"], self._rate)
            row["zensync_ms"] = link_ms(row["zensync_bytes"], self._rate)
        return {
            "ranks": self.size, "steps": self.steps, "rate_bits_per_s": self._rate,
            "error": self.error, **totals(rows, self._rate), "parameters": rows,
        }  # fmt: skip

    def table(self) -> Any:
        """A table for `rich`."""
        from ._observe_text import make_table

        return make_table(self.report())

    def __str__(self) -> str:
        from ._observe_text import as_text

        return as_text(self.report())


def _hook(own: weakref.ref[Observation], place: int) -> Callable[[torch.Tensor], None]:
    @_torch_compat.hidden_from_compiler
    def look(gradient: torch.Tensor) -> None:
        if (found := own()) is not None:
            found._saw(place, gradient)

    return look
