"""What ranks would send, now and with zensync, in the steady state: a model. Pure, without torch.

Sparse jobs are performed on the recorded rows, in this process, and counted; job headers, dense
all-reduces and Gloo's gathering of COO gradients follow from their sizes. docs/observe.md says what
is exact and what is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _core
from ._device_plan import TO_DENSE_ABOVE, TO_SPARSE_BELOW
from ._observed import COO, NONE, Record, Subject, Units
from .bench.figures import ring_bytes

_ALONE_BYTES, _BUFFER_BYTES = 1 << 20, 4 << 20  # as in _parcels.py
_FIRST_BUCKET_BYTES = 1 << 20  # of DDP
_INDEX_BYTES = 8  # torch's COO tensors carry int64 indices
_METADATA_BYTES = 9 * 8  # which Gloo's sparse all-reduce gathers first
_MESSAGE_BYTES, _JOB_BYTES = 8 + 48, 64  # docs/wire_format.md: prefix and header; a job header
_ELEMENT_INDEX_BYTES = 0.9  # about, of an element that is sent by itself; as in the plan
_REPLAY_BYTES = 512 << 20  # of all ranks' values; a larger sum is estimated
_ESTIMATE = 1.06  # over the index-free ideal

_NUMPY = {"float32": "f4", "float64": "f8", "bfloat16": "u2", "float16": "f2"}


@dataclass
class Flow:
    """Bytes of each rank in a step. mesh: [2, ranks], sent to and received from all peers alike;
    ring: [ranks], sent to the right neighbour. handed: to dense all-reduces."""

    mesh: Any
    ring: Any
    handed: float = 0.0

    @classmethod
    def none(cls, ranks: int) -> Flow:
        return cls(np.zeros((2, ranks)), np.zeros(ranks))

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.mesh + other.mesh, self.ring + other.ring, self.handed + other.handed)

    def scaled(self, factor: float) -> Flow:
        return Flow(self.mesh * factor, self.ring * factor, self.handed * factor)

    @property
    def exchanged(self) -> float:
        """By the exchanges of the busiest rank: the larger of sent and received."""
        return float(self.mesh.max())

    def card(self, hosts: Sequence[object]) -> float:
        """The larger of bytes out and in, on the busiest card."""
        ranks, most = len(hosts), 0.0
        for host in set(hosts):
            here = [rank for rank in range(ranks) if hosts[rank] == host]
            away = (ranks - len(here)) / (ranks - 1) if ranks > 1 else 0.0
            sent, received = self.mesh[:, here].sum(axis=1) * away
            for rank in range(ranks):
                right = (rank + 1) % ranks
                if hosts[rank] != hosts[right]:
                    sent += self.ring[rank] * (hosts[rank] == host)
                    received += self.ring[rank] * (hosts[right] == host)
            most = max(most, float(sent), float(received))
        return most


def ring_flow(payload_bytes: float, ranks: int) -> Flow:
    """A dense all-reduce."""
    return Flow(
        np.zeros((2, ranks)), np.full(ranks, ring_bytes(payload_bytes, ranks)), payload_bytes
    )


def headers_flow(jobs: int, ranks: int) -> Flow:
    """The round in which ranks agree on a dense all-reduce: a message to and from each peer."""
    bytes_each = (ranks - 1) * (_MESSAGE_BYTES + _JOB_BYTES * jobs)
    return Flow(np.full((2, ranks), float(bytes_each)), np.zeros(ranks))


def now_flow(record: Record) -> Flow:
    """What DDP sends for a parameter today: mean over the steps that are kept."""
    ranks = len(record.kept[-1].sets)
    if record.subject.is_frozen:
        return Flow.none(ranks)
    whole = Flow.none(ranks)
    for step in record.kept:
        if COO not in step.layouts:
            whole += ring_flow(record.subject.bytes, ranks)
        elif ranks > 1:
            entry = record.subject.row_bytes + _INDEX_BYTES  # Gloo coalesces first
            blocks = [units.size * entry + _METADATA_BYTES for units in step.sets]
            # A rank passes on all blocks but its right neighbour's.
            sent = [sum(blocks) - blocks[(rank + 1) % ranks] for rank in range(ranks)]
            whole += Flow(np.zeros((2, ranks)), np.array(sent, dtype=float))
    return whole.scaled(1 / len(record.kept))


def by_elements(record: Record) -> bool:
    """Whether single elements are sent: so few of a row's are non-zero that rows are longer."""
    subject = record.subject
    if record.layout == COO or subject.row_elems < 2:
        return False
    elements = record.average("element_density") * subject.rows * subject.row_elems
    as_rows = record.average("density") * subject.rows * subject.row_bytes
    return elements * (subject.item_bytes + _ELEMENT_INDEX_BYTES) < 0.8 * as_rows


def way_of(record: Record) -> str:
    """How zensync sends a parameter once it has settled: "none", "dense", "sparse"."""
    subject, is_coo = record.subject, record.layout == COO
    if subject.is_frozen or len(record.kept[-1].sets) == 1:
        return "none"
    if subject.refusal and not is_coo:
        return "dense"
    few = by_elements(record)
    if (record.element_density_max if few else record.density_max) > TO_DENSE_ABOVE:
        return "dense"
    if is_coo or subject.starts_sparse:
        return "sparse"
    densest = record.average("densest_elements" if few else "densest")
    return "sparse" if densest < TO_SPARSE_BELOW else "dense"


@dataclass
class Forecast:
    """What zensync sends. by_place: for each parameter (scheme, flow), without what is shared."""

    by_place: list[tuple[str, Flow]]
    shared: Flow
    ways: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Flow:
        """Of all parameters together."""
        found = self.shared
        for _, flow in self.by_place:
            found = found + flow
        return found


def forecast(records: Sequence[Record], ddp_cap_bytes: int | None) -> Forecast:
    """ddp_cap_bytes: of a DDP's buckets, for the hook; None: as `attach` on a plain module."""
    ranks = len(records[-1].kept[-1].sets)
    ways = [way_of(record) for record in records]
    is_ddp = ddp_cap_bytes is not None
    if not is_ddp:  # what nobody has is not sent
        ways = ["none" if r.layout == NONE else w for r, w in zip(records, ways, strict=True)]
    found = [_flow_of(record, way, ranks) for record, way in zip(records, ways, strict=True)]
    shared = Flow.none(ranks)
    stored = [
        (record.subject, way)
        for record, way in zip(records, ways, strict=True)
        if way != "none" and record.layout != COO
    ]
    groups = _buckets(stored, ddp_cap_bytes) if ddp_cap_bytes is not None else _parcels(stored)
    for group in groups:
        rest = [subject for subject, way in group if way == "dense"]
        if rest:
            probed = sum(not subject.refusal for subject in rest)
            shared += headers_flow(probed + 1, ranks)
    trained = sum(not record.subject.is_frozen for record in records)
    if not is_ddp and ranks > 1:  # which parameters have gradients, on any rank
        shared += headers_flow(1, ranks) + ring_flow((2 * trained + 2) * 4, ranks)
    return Forecast(found, shared, ways)


def _flow_of(record: Record, way: str, ranks: int) -> tuple[str, Flow]:
    subject = record.subject
    if way == "none":
        return "none", Flow.none(ranks)
    if way == "dense" and record.layout == COO:  # values, in fp32 at least, and the union
        wide = subject.rows * subject.row_elems * max(subject.item_bytes, 4)
        flow = headers_flow(1, ranks) + ring_flow(wide, ranks)
        return "dense", flow + ring_flow(subject.rows, ranks)
    if way == "dense":
        return "dense", ring_flow(subject.bytes, ranks)
    if by_elements(record):
        return _by_elements_flow(record, ranks)
    found = [_replay(subject, step.sets) for step in record.kept]
    whole = Flow.none(ranks)
    for _, flow in found:
        whole += flow
    return found[-1][0], whole.scaled(1 / len(found))


def _by_elements_flow(record: Record, ranks: int) -> tuple[str, Flow]:
    """An estimate: within the rows that several ranks have, elements are as if by chance."""
    subject = record.subject
    elems = subject.rows * subject.row_elems
    own, union_rows = record.average("element_density"), record.average("union_density")
    share = own / record.average("density")  # of a row that a rank has
    sharers = ranks * record.average("density") / union_rows
    union = union_rows * (1 - (1 - share) ** sharers)
    balanced, gathered = (ranks - 1) / ranks * (own + union), (ranks - 1) * own
    bytes_each = min(balanced, gathered) * elems * (subject.item_bytes + _ELEMENT_INDEX_BYTES)
    scheme = "balanced" if balanced <= gathered else "agsparse"
    return scheme, Flow(np.full((2, ranks), bytes_each), np.zeros(ranks))


def _replay(subject: Subject, sets: Sequence[Units]) -> tuple[str, Flow]:
    """(scheme, flow) of one sum, the counts of an equal one before it being known."""
    own, ranks = sum(units.size for units in sets), len(sets)
    if own * subject.row_bytes > _REPLAY_BYTES or subject.dtype not in _NUMPY:
        union = np.unique(np.concatenate(sets)).size
        ideal = (ranks - 1) / ranks * (own / ranks + union) * subject.row_bytes
        return "balanced", Flow(np.full((2, ranks), ideal * _ESTIMATE), np.zeros(ranks))
    dtype = _NUMPY[subject.dtype]
    inputs: list[Any] = [(units, np.ones((units.size, subject.row_elems), dtype)) for units in sets]
    options: dict[str, Any] = {"scheme": "auto", "steps": 2, "name": subject.name}
    options["rows"] = subject.rows
    if subject.dtype == "bfloat16":
        options["dtype"] = "bfloat16"
    result = _core.loopback_sum(inputs, options)
    if isinstance(result, _core.ErrorInfo):
        raise RuntimeError(result.message)
    mesh = np.array([result["sent_bytes"], result["received_bytes"]], dtype=float)
    scheme = str(result["reports_by_step"][-1][0]["scheme"])
    return scheme, Flow(mesh, np.zeros(ranks))


Stored = list[tuple[Subject, str]]  # dense-stored parameters, in the order of registration


def _buckets(stored: Stored, cap_bytes: int) -> Iterator[Stored]:
    """DDP's, about: in reverse order, by dtype, the first one smaller. It closes one when full."""
    yield from _grouped(stored, [_FIRST_BUCKET_BYTES, cap_bytes])


def _parcels(stored: Stored) -> Iterator[Stored]:
    """Those of `attach`: large ones alone, small ones in buffers."""
    yield from ([one] for one in stored if one[0].bytes >= _ALONE_BYTES)
    yield from _grouped([one for one in stored if one[0].bytes < _ALONE_BYTES], [_BUFFER_BYTES])


def _grouped(stored: Stored, limits: list[int]) -> Iterator[Stored]:
    open_ones: dict[str, Stored] = {}
    closed: dict[str, int] = {}
    for one in reversed(stored):
        kind = one[0].dtype
        group = open_ones.setdefault(kind, [])
        group.append(one)
        limit = limits[min(closed.get(kind, 0), len(limits) - 1)]
        if sum(subject.bytes for subject, _ in group) >= limit:
            closed[kind] = closed.get(kind, 0) + 1
            yield open_ones.pop(kind)
    yield from open_ones.values()
