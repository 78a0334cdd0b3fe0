"""Every private interface of torch that zensync uses, and every habit of it that zensync relies on.

Nothing else in the package touches a name of torch that starts with an underscore. Each function
here has a test in tests/python/test_compat.py that trips when torch moves it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Counts = tuple[list[int], list[int]]

_CLOSING_TAG = 0x7A656E  # of a message that nobody sends


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store through which the ranks of `group` found each other; keys are the group's own."""
    if group is dist.group.WORLD:
        return distributed_c10d._get_default_store()
    return distributed_c10d._get_process_group_store(group)


def group_is_alive(group: dist.ProcessGroup) -> bool:
    """Whether `group` has not been destroyed."""
    return group in distributed_c10d._world.pg_map


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of the TCPStore below `store`; None if it is a store of another kind."""
    inner: Any = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.TCPStore):
        return inner.host, inner.port
    return None


def group_timeout_s(group: dist.ProcessGroup, otherwise_s: float) -> float:
    """The time-out of the group's backend in seconds, that for CPU tensors where it has several;
    `otherwise_s` where it says none."""
    for device in sorted(device_types(group), key=lambda one: one != "cpu"):
        try:
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        return timeout.total_seconds()
    return otherwise_s


def make_gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """A Gloo backend over keys of `store` that nobody else uses. A collective call.

    Not `dist.new_group`: its name is made from the number of groups that this process has had,
    which need not be equal on the ranks of a sub-group, and comes back after a group was destroyed.
    Its threads, which add, do not flush denormals, whatever this thread does.
    """
    flushes = bool((torch.tensor([1e-40]) * 1.0 == 0).item())
    torch.set_flush_denormal(False)
    try:
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    finally:
        torch.set_flush_denormal(flushes)


def device_types(group: dist.ProcessGroup) -> dict[str, str]:
    """What the group's backends are called in torch's registry, by type of device."""
    entries = [entry.partition(":") for entry in dist.get_backend_config(group).split(",")]
    return {device: name.lower() for device, _, name in entries if name}


def cpu_backend_name(group: dist.ProcessGroup) -> str | None:
    """What the group's backend for CPU tensors is called in torch's registry; None: it has none."""
    return device_types(group).get("cpu")


def make_backend(name: str, store: dist.Store, group: dist.ProcessGroup, timeout_s: float) -> Any:
    """A backend of the kind `name`, other than Gloo, for the ranks of `group`, made as torch does
    it, over keys of `store` that nobody else uses. A collective call. LookupError: not available.

    Not `dist.new_group`, for the reasons of `make_gloo`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    timeout = timedelta(seconds=timeout_s)
    ranks = dist.get_process_group_ranks(group)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None and plugin.extended_api:
        options: Any = distributed_c10d._DistributedBackendOptions()
        options.store, options.timeout = store, timeout
        options.group_rank, options.group_size = rank, size
        options.group_id, options.global_ranks_in_group = "zensync", ranks
        return plugin.creator_fn(options, None)
    if plugin is not None:
        return plugin.creator_fn(store, rank, size, timeout)
    if name == "nccl" and dist.is_nccl_available():
        options = distributed_c10d.ProcessGroupNCCL.Options()
        # Its watchdog ends the process at its time-out: not before this library's own deadline.
        options._timeout = 2 * timeout
        return distributed_c10d.ProcessGroupNCCL(store, rank, size, options)
    if name == "mpi" and dist.is_mpi_available():
        return distributed_c10d.ProcessGroupMPI.create(ranks)
    if name == "ucc" and dist.is_ucc_available():
        return distributed_c10d.ProcessGroupUCC(store, rank, size, timeout=timeout)
    raise LookupError("it is not built in and not registered, or for devices only")


def start_all_reduce(backend: Any, tensor: torch.Tensor, op: Any, timeout_s: float) -> Any:
    """Starts an all-reduce of a backend made here; with Gloo it fails after `timeout_s`."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.timeout = timedelta(seconds=timeout_s)
    return backend.allreduce([tensor], options)


def start_all_to_all(
    backend: Any, to: torch.Tensor, given: torch.Tensor, counts: Counts, timeout_s: float
) -> Any:
    """Starts an exchange of unequal parts of flat tensors; counts: of `to` and of `given` by rank,
    both empty where all are equal. With Gloo it fails after `timeout_s`."""
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=timeout_s)
    return backend.alltoall_base(to, given, *counts, options)


def start_all_gather(backend: Any, to: torch.Tensor, given: torch.Tensor, timeout_s: float) -> Any:
    """Starts to gather `given` of all ranks in `to`; with Gloo it fails after `timeout_s`."""
    options = distributed_c10d.AllgatherOptions()
    options.timeout = timedelta(seconds=timeout_s)
    return backend._allgather_base(to, given, options)


def is_gloo(backend: Any) -> bool:
    """Whether waits and ends of a backend are those of Gloo."""
    return isinstance(backend, dist.ProcessGroupGloo)


def close_backend(backend: Any, rank: int, size: int) -> None:
    """Ends the collectives of a backend made here, and the backend with them."""
    if is_gloo(backend):
        close_gloo(backend, rank, size)
        return
    with contextlib.suppress(Exception):  # few backends can, and each says it in its own way
        backend.abort()


def close_gloo(gloo: Any, rank: int, size: int) -> None:
    """Closes all connections of a Gloo backend; its collectives then fail, here and on the peers.

    A receive whose wait expires does that, if it is from a peer that is still connected. `abort`
    does not, and to drop the backend is not enough while a collective of it, or a traceback that
    has seen one, is alive.
    """
    for step in range(1, size):
        with contextlib.suppress(RuntimeError):  # expired, or not connected any more
            work = gloo.recv([torch.zeros(1)], (rank + step) % size, _CLOSING_TAG)
            work.wait(timedelta(milliseconds=1))


def own_client(store: dist.Store) -> dist.Store:
    """The same store over a connection of its own, where torch can make one.

    A client of a TCPStore is locked while it waits: threads that share one wait for each other.
    """
    clone: Any = getattr(store, "clone", None)  # not in every torch
    try:
        return clone() if clone is not None else store
    except RuntimeError:  # a store that cannot
        return store


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether it is a subclass that says itself what operations do: it may hold no memory."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def wait_slice(work: Any, seconds: float) -> bool:
    """Waits for a Gloo collective for at most `seconds`; whether it has ended. Raises its error.

    An all-reduce whose wait expires goes on, and may be waited for again.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def keep_forever(thing: object) -> None:
    """Never destroys `thing`: a Gloo group's destructor would wait for a stuck collective."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def coo_indices(tensor: torch.Tensor) -> torch.Tensor:
    """int64[sparse_dim, entries] of a COO tensor, coalesced or not."""
    return tensor._indices()


def coo_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values [entries, *dense shape] of a COO tensor, coalesced or not."""
    return tensor._values()


def backward_id() -> int:
    """A number of the backward that runs on this thread, another for each; −1 outside of any."""
    return torch._C._current_graph_task_id()


def at_backward_end(action: Callable[[], None]) -> None:
    """Calls `action` once, when the backward that runs on this thread has ended well; what it
    raises is raised by `backward()`. Only inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def hidden_from_compiler(function: Any) -> Any:
    """`function`, which `torch.compile` runs as it is. As `torch.compiler.disable`, which would
    import the compiler, for a second or two."""
    function._torchdynamo_disable = True
    return function


def ignore_in_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """A DDP that is made of `module` later leaves these parameters alone (names as of
    `named_parameters`)."""
    ddp = torch.nn.parallel.DistributedDataParallel
    known = list(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
    # For those of the module itself torch looks up both `name` and `.name`.
    dotted = [f".{name}" for name in names if "." not in name]
    ddp._set_params_and_buffers_to_ignore_for_model(module, sorted({*known, *names, *dotted}))


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter of an FSDP2 unit. shape: that of its gradient here, before it is cut along `dim`
    (with tensor parallelism, this rank's part)."""

    sharded: torch.nn.Parameter
    shape: torch.Size
    dim: int


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 reduce-scatters together, in the order of the buffer. group: they are
    sharded over; None: they are not. device: where the buffer is."""

    module: Any
    group: Any
    device: torch.device
    parameters: list[FsdpParameter]
    state: Any

    def syncs(self) -> tuple[bool, bool]:
        """Whether a backward reduce-scatters, and all-reduces over replicas."""
        return self.state.reduce_grads, self.state.all_reduce_grads

    def set_syncs(self, syncs: tuple[bool, bool]) -> None:
        """The reverse of `syncs`."""
        self.state.reduce_grads, self.state.all_reduce_grads = syncs


def is_fsdp_unit(module: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was called on this very module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def fsdp_units(module: torch.nn.Module) -> list[FsdpUnit]:
    """FSDP2 units in `module`. One with groups of parameters on several meshes has several
    entries; one without parameters none."""
    found = []
    part: Any
    for part in module.modules():
        if not is_fsdp_unit(part):
            continue
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older versions of torch have one
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for one in groups:
            is_sharded = hasattr(one.mesh_info, "shard_process_group")
            group = one._reduce_scatter_process_group if is_sharded else None
            parameters = [
                FsdpParameter(p.sharded_param, p._orig_size, p.fsdp_placement.dim)
                for p in one.fsdp_params
            ]
            found.append(FsdpUnit(part, group, one.device, parameters, one))
    return found


def place_in_join(joinable: Any) -> str:
    """Where it stands in the `Join([...])` that is entered last: "none", "first" or "later"."""
    config = joinable._join_config
    if not config.enable:
        return "none"
    return "first" if config.is_first_joinable else "later"


def leave_join(joinable: Any) -> None:
    """It no longer tells ranks that have joined; torch itself leaves that as it was."""
    joinable._join_config = joinable._join_config.construct_disabled_join_config()


def is_in_ddp() -> bool:
    """Whether the forward of a DDP is under way."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
