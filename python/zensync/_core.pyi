"""The binding of the core (python/src). Pointers are addresses as int; memory is the caller's."""

import enum
from typing import Any, Protocol

import numpy as np

__version__: str

class DType(enum.Enum):
    F32 = 0
    F64 = 1
    BF16 = 2
    F16 = 3
    I32 = 4
    I64 = 5

class ReduceOp(enum.Enum):
    SUM = 0
    AVG = 1

class Layout(enum.Enum):
    DENSE = 0
    COO = 1

class Outcome(enum.Enum):
    DONE = 0
    USE_DENSE = 1

class ErrorInfo:
    """What went wrong, as a value. Ranks are -1 where they are not known."""

    kind: str
    message: str
    rank: int
    culprit: int
    tensor: str
    def __init__(self, kind: str, message: str, tensor: str = "") -> None: ...

class TensorSpec:
    """rows × row_elems elements of one dtype; row_elems ≥ 1."""

    rows: int
    row_elems: int
    dtype: DType
    layout: Layout
    def __init__(
        self, rows: int, row_elems: int, dtype: DType, layout: Layout = Layout.DENSE
    ) -> None: ...

class DenseTensor:
    """Contiguous memory, summed in place. ids: int64, ascending, distinct rows; 0: scan."""

    def __init__(self, data: int, spec: TensorSpec, ids: int = 0, ids_count: int = 0) -> None: ...

class CooTensor:
    """indices int64[entries], values [entries × row_elems]."""

    def __init__(self, indices: int, values: int, entries: int, spec: TensorSpec) -> None: ...

class JobOptions:
    name: str
    op: ReduceOp
    def __init__(
        self, name: str, op: ReduceOp, allow_dense: bool = True, starts_dense: bool = False
    ) -> None: ...

class Job:
    """What follows `done` is for a job that has ended; ValueError before."""

    def wait(self, timeout_s: float) -> bool: ...
    def done(self) -> bool: ...
    @property
    def error(self) -> ErrorInfo | None: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def report(self) -> dict[str, Any]: ...
    @property
    def result_entries(self) -> int: ...
    def copy_result(self, indices: int, values: int) -> None: ...

class Engine:
    def submit_dense(self, tensor: DenseTensor, options: JobOptions) -> Job: ...
    def submit_coo(self, tensor: CooTensor, options: JobOptions) -> Job: ...
    def submit_reduce_scatter(
        self, tensor: DenseTensor, output: int, by_rows: bool, options: JobOptions
    ) -> Job:
        """output: the address of this rank's shard, contiguous, in the tensor's dtype."""
    def agree(self, items: list[tuple[DenseTensor, JobOptions, bool]]) -> Job:
        """items: (tensor, its address or 0, name and op, whether its density is probed)."""
    def would_be_dense(self, name: str, spec: TensorSpec, starts_dense: bool) -> bool: ...
    @property
    def error(self) -> ErrorInfo | None: ...
    def settled(self) -> ErrorInfo | None:
        """As `error`, once all ranks agree on what they call it."""
    @property
    def wire_count(self) -> tuple[int, int]: ...
    def begin_dense(self, name: str) -> None: ...
    def end_dense(self) -> None: ...
    def take_notices(self) -> list[str]: ...
    def forget(self) -> None:
        """In a forked child only: closes the parent's connections there."""
    def close(self, timeout_s: float) -> None: ...
    def abort(self, why: ErrorInfo) -> None: ...

class RecvSlot:
    """Where one awaited message of an exchange of the torch driver goes."""

    @property
    def peer(self) -> int: ...
    @property
    def capacity_bytes(self) -> int: ...
    def allocate(self, size_bytes: int) -> memoryview | ErrorInfo:
        """Memory for the message; an error if it is longer than can be expected."""

class Link(Protocol):
    """What the torch driver runs on. Messages are (peer, bytes)."""

    def exchange(
        self, sends: list[tuple[int, memoryview]], recvs: list[RecvSlot], timeout_s: float
    ) -> ErrorInfo | None: ...
    def flush(self, timeout_s: float) -> ErrorInfo | None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...

class LinkDriver:
    """A torch driver without an engine, for tests of its contract."""

    def __init__(self, rank: int, size: int, link: Link) -> None: ...
    def exchange(
        self, sends: list[tuple[int, bytes]], recvs: list[tuple[int, int]], timeout_s: float
    ) -> list[bytes] | ErrorInfo:
        """recvs: (peer, capacity in bytes) each."""
    def flush(self, timeout_s: float) -> ErrorInfo | None: ...
    def abort(self, why: ErrorInfo) -> None: ...
    @property
    def wire_count(self) -> list[int]: ...

def deadline_info(rank: int, delivering: list[int], taking: list[int]) -> ErrorInfo: ...
def lost_info(rank: int, peer: int, how: str) -> ErrorInfo: ...

class Rendezvous(Protocol):
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, key: str, timeout_s: float) -> bytes | None: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def check(self) -> None: ...

def open_engine(
    rank: int, size: int, rendezvous: Rendezvous, options: dict[str, Any]
) -> Engine | ErrorInfo:
    """Opens the control connections and the native mesh, or with open_link the torch driver; a
    collective call.

    open_link(fault) gives a Link once all ranks have come; fault() is what the control connections
    know by then, an ErrorInfo or None, of use until open_link returns.

    options: name, address, scheme, max_bytes, deadline_s, silent_after_s, verify, hosts, timeout_s,
    connect_timeout_s, control, open_link and, for tests and comparisons, beat_s, warn_after_s,
    faults (see driver/faulty.hpp), codec, partition, parts; None: not given.
    """

def address_towards(host: str, port: int, interface_name: str = "") -> str | ErrorInfo: ...
def info() -> dict[str, Any]: ...
def environment() -> dict[str, Any]: ...
def loopback_sum(
    inputs: list[np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]],
    options: dict[str, Any],
) -> dict[str, Any] | ErrorInfo:
    """Sums one array, or (indices, values), per rank over counting(loopback): ranks are threads.

    options: those of `open_engine`, and name, op ("sum", "avg"), dtype ("bfloat16": uint16 arrays
    hold it), rows (of COO tensors), allow_dense, starts_dense, steps (the same job again and
    again); hosts is a list of ints here, one per rank. Result: results, sent_bytes,
    received_bytes (of the last step), outcomes, errors, reports by rank; reports_by_step.
    """

Pairs = list[tuple[float, float]]

def kernels_error() -> ErrorInfo | None:
    """Why the kernels that ZENSYNC_CPU_TARGET asks for cannot run; None if they can."""

def time_encode(tensor: np.ndarray[Any, Any], ranks: int, iterations: int) -> Pairs:
    """(seconds to find, partition and encode, seconds of a memcpy) per iteration; float32."""

def time_write_back(tensor: np.ndarray[Any, Any], ranks: int, iterations: int) -> Pairs: ...
def time_find_rows(tensor: np.ndarray[Any, Any], row_elems: int, iterations: int) -> Pairs: ...
def time_coalesce(indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> float: ...
def time_exchange(
    folder: str, rank: int, size: int, message_bytes: int, iterations: int
) -> list[float] | ErrorInfo:
    """Seconds of each exchange over a native mesh that meets in `folder`; one call per rank."""

def owner_counts(
    units: np.ndarray[Any, Any], units_in_all: int, ranks: int, name: str, rotation: bool
) -> list[int]: ...
