"""`zensync.attach`, the one door: synchronises the gradients of a module from now on.

A plain module: hooks of its own (`_backward.py`), for all parameters, or in front of DDP for the
tables only. A DDP: `zensync.hook` on it. FSDP2: `_fsdp.py`. What cannot be done is refused, and the
other ranks told.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _torch_compat
from ._arguments import require_group
from ._backward import Attachment, Named, Tensors, tensors_in
from ._device import require_device
from ._fsdp import attach_fsdp, is_fsdp
from ._mesh import refuse_mesh
from ._names import embeddings_and_others, is_table_shape
from ._tensors import DTYPES
from .ddp_hook import hook
from .errors import Error, UnsupportedError
from .state import State

_ALL, _TABLES = "all", "tables"
_attached: weakref.WeakKeyDictionary[torch.nn.Module, Attachment] = weakref.WeakKeyDictionary()
_hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # forward hooks stay
_logger = logging.getLogger("zensync.init")


def attach(
    module: torch.nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    parameters: str | Iterable[torch.nn.Parameter] = _ALL,
    **options: Any,
) -> State:
    """Averages the gradients of `module` over the ranks of `group` in every backward from now on.

    A collective call. When `backward()` returns, gradients are final and equal in all bits on all
    ranks: averaged as DDP does; of a parameter that only some ranks used, all get one; None stays
    None where nobody has one. Dense-stored and COO gradients (which come back coalesced), tied,
    unused and functional tables. The State lives as long as the module; `state.no_sync()` is for
    accumulation. A second backward before `zero_grad()` averages what has accumulated, as DDP does.

    module: a plain module; a DDP, whose gradients then go through `zensync.hook` (`group` is its
    own); an FSDP2 module, whose units with tables are reduce-scattered by non-zeros from now on.
    parameters, for a plain module: "all" (no DDP is needed), "tables" (embeddings, and what has
    their shape: call this before `DDP(module)`, which then leaves them alone), or those themselves.
    They get rank 0's values, with "all" the buffers too.
    options: those of `State`.
    Errors: as of `State`; MismatchError if parameters differ between ranks, UnsupportedError for
    modules and parameters that cannot be synchronised. `backward()` raises the errors of its jobs;
    after `state.close()` it raises Error.
    """
    if isinstance(module, DistributedDataParallel):
        return _attach_to_ddp(module, group, parameters, options)
    if isinstance(module, torch.nn.Module) and is_fsdp(module):
        if parameters != _ALL:
            raise Error("parameters= is for a plain module; leave it out for FSDP2")
        return attach_fsdp(module, group, options)
    return _attach_plain(module, group, parameters, options)


def _attach_plain(
    module: torch.nn.Module,
    group: dist.ProcessGroup | None,
    parameters: Any,
    options: dict[str, Any],
) -> State:
    used = require_group(group)
    try:
        find = _finder(module, parameters)
        taken = find()
        if not any(parameter.requires_grad for _, parameter in taken):
            raise UnsupportedError("the module has no parameter that requires a gradient")
        for name, parameter in taken:
            _require_parameter(name, parameter, used)
        before = _attached.get(module)
        if before is not None and not before.state.is_closed:
            raise Error("a State is attached to this module already; close() that one first")
    except Error as why:
        refuse_mesh(used, why)
        raise
    if before is not None:
        before.unhook()
    state = State(used, module=module, **options)
    try:
        attachment = Attachment(state, find, _buffers_of(module, parameters))
        attachment.take_from(0)
    except BaseException:
        state.close()
        raise
    _attached[module] = attachment
    state.set_attached(weakref.ref(attachment))
    state.set_no_sync(_weak_no_sync(weakref.ref(attachment)))
    if parameters != _ALL:
        _torch_compat.ignore_in_ddp(module, [name for name, _ in taken])
    if module not in _hooked:
        _hooked.add(module)
        module.register_forward_pre_hook(_before_forward)
        module.register_forward_hook(_after_forward)
    return state


def is_attached(module: torch.nn.Module) -> bool:
    """Whether an open State takes care of a plain module."""
    found = _attached.get(module)
    return found is not None and not found.state.is_closed


def _buffers_of(module: torch.nn.Module, parameters: Any) -> Callable[[], Tensors]:
    weak = weakref.ref(module)

    def buffers() -> Tensors:
        alive = weak()
        return list(alive.named_buffers()) if alive is not None and parameters == _ALL else []

    return buffers


def _weak_no_sync(attachment: weakref.ref[Attachment]) -> Any:
    def enter() -> Any:
        found = attachment()
        if found is None:
            raise Error("the module that this State was attached to is gone")
        return found.no_sync()

    return enter


@_torch_compat.hidden_from_compiler
def _before_forward(module: torch.nn.Module, _: Any) -> None:
    """Looked up by module: a copy of one has its hooks, but is not attached."""
    if (attachment := _attached.get(module)) is not None:
        attachment.before_forward()


@_torch_compat.hidden_from_compiler
def _after_forward(module: torch.nn.Module, _: Any, output: Any) -> None:
    attachment = _attached.get(module)
    if attachment is None or not torch.is_grad_enabled():
        return
    found = weakref.ref(attachment)

    def on_backward(_: torch.Tensor) -> None:
        if (alive := found()) is not None:
            alive.arm()

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(on_backward)


def _finder(module: Any, parameters: Any) -> Any:
    """A function that gives the parameters to take over, as (name, parameter), tied ones once."""
    if not isinstance(module, torch.nn.Module):
        raise Error(f"attach needs a torch.nn.Module, not {type(module).__name__}")
    _require_not_sharded(module)
    weak = weakref.ref(module)

    def everything() -> Named:
        alive = weak()
        return [] if alive is None else list(alive.named_parameters())

    if isinstance(parameters, str):
        if parameters == _ALL:
            return everything
        if parameters != _TABLES:
            raise Error(f'parameters= must be "all", "tables" or parameters, not {parameters!r}')
        wanted = _tables_of(module)
        if not wanted:
            raise UnsupportedError('parameters="tables", but the module has no table')
    else:
        wanted = _ids_of(module, parameters)
    return lambda: [(name, one) for name, one in everything() if id(one) in wanted]


def _ids_of(module: torch.nn.Module, parameters: Any) -> set[int]:
    try:
        wanted = {id(one) for one in parameters}
    except TypeError:
        kind = type(parameters).__name__
        raise Error(f"parameters= must be a text or a list of parameters, not {kind}") from None
    if not wanted <= {id(one) for one in module.parameters()}:
        raise Error("parameters= has some that are not the module's")
    return wanted


def _tables_of(module: torch.nn.Module) -> set[int]:
    embeddings, _ = embeddings_and_others(module)
    return embeddings | {id(one) for one in module.parameters() if is_table_shape(one)}


def _require_not_sharded(module: torch.nn.Module) -> None:
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch.distributed"):
            continue
        if kind.__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "FSDP1 is not supported: its flat parameters have no rows; use fully_shard (FSDP2) "
                "or DistributedDataParallel"
            )


def _require_parameter(name: str, parameter: torch.Tensor, group: dist.ProcessGroup) -> None:
    """UnsupportedError unless gradients of `parameter` can be synchronised."""
    what = f'parameter "{name}": '
    if torch.nn.parameter.is_lazy(parameter):
        raise UnsupportedError(what + "it is lazy and has no values yet; run the module once")
    if _torch_compat.has_own_dispatch(parameter):
        kind = type(parameter).__name__
        raise UnsupportedError(what + f"{kind} is sharded or has no memory of its own")
    if parameter.is_meta:
        raise UnsupportedError(what + "it is on the meta device; materialise the module first")
    if parameter.layout != torch.strided:
        raise UnsupportedError(what + f"{parameter.layout}; only its gradients may be sparse")
    try:
        require_device(parameter.device, group)
    except UnsupportedError as why:
        raise UnsupportedError(what + why.message) from None
    dtype = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
    if parameter.requires_grad and dtype not in DTYPES:
        raise UnsupportedError(what + f"dtype {parameter.dtype} is not supported")


def _attach_to_ddp(
    ddp: DistributedDataParallel,
    group: dist.ProcessGroup | None,
    parameters: Any,
    options: dict[str, Any],
) -> State:
    own = ddp.process_group
    if group is not None and group is not own:
        raise Error("group= is not the group of this DistributedDataParallel; leave it out")
    if parameters != _ALL:
        raise Error("parameters= is for a plain module: attach it before DistributedDataParallel")
    _warn_of_tables(ddp)
    state = State(own, module=ddp.module, **options)
    try:
        ddp.register_comm_hook(state, hook)
    except BaseException as why:
        state.close()
        raise Error(f"this DistributedDataParallel takes no hook: {why}") from why
    weak = weakref.ref(ddp)

    def enter() -> Any:
        if (alive := weak()) is None:
            raise Error("the DistributedDataParallel of this State is gone")
        return alive.no_sync()

    state.set_no_sync(enter)
    return state


def _warn_of_tables(ddp: DistributedDataParallel) -> None:
    """Says what a hook cannot cure: DDP itself fails there."""
    sparse = {
        id(part.weight)
        for part in ddp.module.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }
    if not sparse:
        return
    uses = [id(one) for _, one in ddp.module.named_parameters(remove_duplicate=False)]
    tied = [one for one in sparse if uses.count(one) > 1]
    if tied or ddp.find_unused_parameters:
        _logger.warning(
            "zensync: DistributedDataParallel fails on sparse=True tables that are tied, or unused "
            'in a step; call zensync.attach(module, parameters="tables") before '
            "DistributedDataParallel(module) in place of zensync.attach(ddp)"
        )
