"""The prefetch pipeline: rows travel from the store to the cache ahead of their batch, and back behind it.

    lane      op        work                    of batch b starts after
    data      X_READ    next batch and plan     OPT(b - read_ahead)
    net-in    X_FETCH     store -> staging        X_READ(b), X_INSERT(b - prefetch_depth), X_WRITEBACK(fetch_after(b))
    copy      X_EVICT   slots -> staging        X_READ(b), X_WRITEBACK(b - write_depth), X_UPDATE(evict_after(b))
              X_INSERT     staging -> slots        X_FETCH(b), X_EVICT(b)
    compute   F, B      per micro-batch         X_INSERT(b)
              X_UPDATE  once per row and batch  every B of b
              OPT       once per batch          every B of b
    net-out   X_WRITEBACK   staging -> store        X_EVICT(b)

With several ranks a row is in the cache of its owner only, and lanes of their own carry it to the ranks that use it:

    pull      X_PREPULL      rows b - 1 does not use   X_INSERT(b), X_UPDATE(b - 2), X_UPDATE_LATE(b - 2)
              X_PULL         rows b - 1 used           X_UPDATE(b - 1)
    compute   F, B, OPT                                X_PULL(b)
              X_UPDATE       rows that b + 1 uses      X_PUSH(b)
    push      X_PUSH         their gradients           every B of b
              X_PUSH_LATE    the other gradients
              X_UPDATE_LATE  their rows
    ack       X_ACK          all ranks' write-backs    X_WRITEBACK(b)

so only X_PULL, X_PUSH and X_UPDATE stand between two batches' compute. Fetches wait for X_ACK in the place of
X_WRITEBACK (another rank may have written the row), evictions for X_UPDATE_LATE too.

Every lane just does its own work for batch 0, 1, 2, …; the edges below are all that orders lanes against each other.
Evaluation changes no row, so nothing is evicted to the store: rows that leave are simply overwritten, once the last
forward that reads them is done; and all of a batch's rows can be pulled ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Resource, Stage

__all__ = ["EVICT_AFTER", "FETCH_AFTER", "prefetch"]

#: Hazard: the batch whose evicted rows the store must have acknowledged before the fetch is sent.
FETCH_AFTER = "fetch_after"
#: Hazard: the batch whose use of the leaving rows must be over before their slots are read or reused (evict_after).
EVICT_AFTER = "evict_after"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The parameters of `prefetch`."""

    prefetch_depth: int
    read_ahead: int
    write_depth: int
    microbatches: int
    direct: bool
    ranks: int
    settles: bool


def prefetch(
    *,
    prefetch_depth: int,
    read_ahead: int,
    write_depth: int,
    microbatches: int = 1,
    train: bool = True,
    direct: bool = False,
    ranks: int = 1,
    settles: bool = False,
) -> Loop:
    """The prefetch pipeline of one rank.

    Args:
        prefetch_depth: batches fetched and not yet inserted, at most: number of fetch staging buffers.
        read_ahead: batches read and not yet trained, at most.
        write_depth: batches evicted and not yet stored, at most: number of write staging buffers.
        microbatches: micro-batches per batch. Forwards and backwards alternate, so that one micro-batch's activations
            are alive at a time.
        train: False: evaluation, forwards only.
        direct: give the hazards the constant delays of direct mode (every row is written back and fetched again) so
            that checks and simulation see them. The runner asks the plan in any case.
        ranks: ranks of the job. With more than one, rows travel between them.
        settles: OPT finds out whether the ranks leave the batch out, so that no row is updated before.

    Raises:
        ScheduleError: a depth, the number of micro-batches or of ranks is below 1.
    """
    shape = _Shape(
        prefetch_depth=prefetch_depth,
        read_ahead=read_ahead,
        write_depth=write_depth,
        microbatches=microbatches,
        direct=direct,
        ranks=ranks,
        settles=settles,
    )
    for name in ("prefetch_depth", "read_ahead", "write_depth", "microbatches", "ranks"):
        if getattr(shape, name) < 1:
            raise ScheduleError(f"{name} must be at least 1, got {getattr(shape, name)}")
    parts = _BUILDERS[train, ranks > 1](shape)
    return Loop(
        lanes=parts.lanes,
        edges=parts.edges,
        source=(0, "X_READ"),
        sink=(0, parts.sink),
        stages=(Stage(number=0, name="model", micro_per_batch=microbatches),),
        resources=tuple(resource for resource in _RESOURCES if resource.name in parts.lanes),
    )


_RESOURCES = (
    Resource(name="data", kind="cpu"),
    Resource(name="net-in", kind="nic"),
    Resource(name="copy", kind="copy"),
    Resource(name="pull", kind="copy"),
    Resource(name="compute", kind="gpu"),
    Resource(name="push", kind="copy"),
    Resource(name="net-out", kind="nic"),
    Resource(name="ack", kind="nic"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Lanes and edges of a pipeline, and the op that ends a batch."""

    lanes: Mapping[str, tuple[Template, ...]]
    edges: tuple[Edge, ...]
    sink: str


def _lane(*ops: str) -> tuple[Template, ...]:
    return tuple(Template(op=op) for op in ops)


def _micro(shape: _Shape, *ops: str) -> tuple[Template, ...]:
    return tuple(Template(op=op, unit=unit) for unit in range(shape.microbatches) for op in ops)


def _capacity(src: str, dst: str, buffers: int) -> Edge:
    return Edge(src=src, dst=dst, delay=buffers, kind="capacity")


def _hazard(src: str, dst: str, name: str, direct_delay: int, shape: _Shape) -> Edge:
    return Edge(src=src, dst=dst, delay=direct_delay if shape.direct else None, kind="hazard", hazard=name)


def _row_edges(shape: _Shape, acknowledged: str, updates: tuple[str, ...]) -> tuple[Edge, ...]:
    """Store to cache and back, whoever trains."""
    return (
        Edge(src="X_READ", dst="X_FETCH"),
        _capacity("X_INSERT", "X_FETCH", shape.prefetch_depth),
        # In direct mode the rows batch b fetches are those batch b-1 left, and eviction b takes them out.
        _hazard(acknowledged, "X_FETCH", FETCH_AFTER, 0, shape),
        Edge(src="X_READ", dst="X_EVICT"),
        *(_hazard(update, "X_EVICT", EVICT_AFTER, 1, shape) for update in updates),
        _capacity("X_WRITEBACK", "X_EVICT", shape.write_depth),
        Edge(src="X_FETCH", dst="X_INSERT"),
        Edge(src="X_EVICT", dst="X_INSERT"),
        Edge(src="X_EVICT", dst="X_WRITEBACK"),
    )


def _training(shape: _Shape) -> _Parts:
    lanes = {
        "data": _lane("X_READ"),
        "net-in": _lane("X_FETCH"),
        "copy": _lane("X_EVICT", "X_INSERT"),
        "compute": (*_micro(shape, "F", "B"), *_lane("X_UPDATE", "OPT")),
        "net-out": _lane("X_WRITEBACK"),
    }
    edges = (
        *_row_edges(shape, "X_WRITEBACK", ("X_UPDATE",)),
        Edge(src="X_INSERT", dst="F"),
        Edge(src="F", dst="B"),
        Edge(src="B", dst="X_UPDATE"),
        Edge(src="B", dst="OPT"),
        _capacity("OPT", "X_READ", shape.read_ahead),
    )
    return _Parts(lanes=lanes, edges=edges, sink="OPT")


def _training_of_ranks(shape: _Shape) -> _Parts:
    lanes = {
        "data": _lane("X_READ"),
        "net-in": _lane("X_FETCH"),
        "copy": _lane("X_EVICT", "X_INSERT"),
        "pull": _lane("X_PREPULL", "X_PULL"),
        # The dense step fills the time the gradients travel.
        "compute": (*_micro(shape, "F", "B"), *_lane("OPT", "X_UPDATE")),
        "push": _lane("X_PUSH", "X_PUSH_LATE", "X_UPDATE_LATE"),
        "net-out": _lane("X_WRITEBACK"),
        "ack": _lane("X_ACK"),
    }
    edges = (
        *_row_edges(shape, "X_ACK", ("X_UPDATE", "X_UPDATE_LATE")),
        Edge(src="X_WRITEBACK", dst="X_ACK"),
        Edge(src="X_INSERT", dst="X_PREPULL"),
        Edge(src="X_UPDATE", dst="X_PREPULL", delay=2),
        Edge(src="X_UPDATE_LATE", dst="X_PREPULL", delay=2),
        Edge(src="X_PREPULL", dst="X_PULL"),
        Edge(src="X_UPDATE", dst="X_PULL", delay=1),
        Edge(src="X_PULL", dst="F"),
        Edge(src="F", dst="B"),
        Edge(src="B", dst="OPT"),
        Edge(src="B", dst="X_PUSH"),
        Edge(src="B", dst="X_UPDATE"),
        Edge(src="X_PUSH", dst="X_UPDATE"),
        Edge(src="X_PUSH", dst="X_PUSH_LATE"),
        Edge(src="B", dst="X_UPDATE_LATE"),
        Edge(src="X_PUSH_LATE", dst="X_UPDATE_LATE"),
        *((Edge(src="OPT", dst="X_UPDATE_LATE"),) if shape.settles else ()),
        _capacity("X_UPDATE", "X_READ", shape.read_ahead),
    )
    return _Parts(lanes=lanes, edges=edges, sink="X_UPDATE")


def _evaluation_edges(shape: _Shape, ready: str) -> tuple[Edge, ...]:
    return (
        Edge(src="X_READ", dst="X_FETCH"),
        _capacity("X_INSERT", "X_FETCH", shape.prefetch_depth),
        Edge(src="X_FETCH", dst="X_INSERT"),
        _hazard("F", "X_INSERT", EVICT_AFTER, 1, shape),
        Edge(src=ready, dst="F"),
        _capacity("F", "X_READ", shape.read_ahead),
    )


def _evaluation(shape: _Shape) -> _Parts:
    lanes = {
        "data": _lane("X_READ"),
        "net-in": _lane("X_FETCH"),
        "copy": _lane("X_INSERT"),
        "compute": _micro(shape, "F"),
    }
    return _Parts(lanes=lanes, edges=_evaluation_edges(shape, "X_INSERT"), sink="F")


def _evaluation_of_ranks(shape: _Shape) -> _Parts:
    lanes = {
        "data": _lane("X_READ"),
        "net-in": _lane("X_FETCH"),
        "copy": _lane("X_INSERT"),
        "pull": _lane("X_PREPULL"),
        "compute": _micro(shape, "F"),
    }
    edges = (
        *_evaluation_edges(shape, "X_PREPULL"),
        Edge(src="X_INSERT", dst="X_PREPULL"),
        # Rows of batch b arrive where those of b - 2 were.
        _capacity("F", "X_PREPULL", 2),
    )
    return _Parts(lanes=lanes, edges=edges, sink="F")


#: (training, several ranks) -> builder.
_BUILDERS: Mapping[tuple[bool, bool], Callable[[_Shape], _Parts]] = {
    (True, False): _training,
    (True, True): _training_of_ranks,
    (False, False): _evaluation,
    (False, True): _evaluation_of_ranks,
}
