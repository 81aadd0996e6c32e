"""The prefetch pipeline: rows travel from the store to the cache ahead of their batch, and back behind it.

    lane      op        work                    of batch b starts after
    data      X_READ    next batch and plan     OPT(b - read_ahead)
    net-in    X_GET     store -> staging        X_READ(b), X_PUT(b - prefetch_depth), X_STORE(fetch_after(b))
    copy      X_EVICT   slots -> staging        X_READ(b), X_STORE(b - write_depth), X_UPDATE(evict_after(b))
              X_PUT     staging -> slots        X_GET(b), X_EVICT(b)
    compute   F, B      per micro-batch         X_PUT(b)
              X_UPDATE  once per row and batch  every B of b
              OPT       once per batch          every B of b
    net-out   X_STORE   staging -> store        X_EVICT(b)

Every lane just does its own work for batch 0, 1, 2, …; the edges below are all that orders lanes against each other.
Evaluation changes no row, so nothing is evicted to the store: rows that leave are simply overwritten, once the last
forward that reads them is done.
"""

from __future__ import annotations

from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.loop import Loop, Template
from bagpipe.schedule.program import Edge, Resource, Stage

__all__ = ["EVICT_AFTER", "FETCH_AFTER", "prefetch"]

#: Hazard: the batch whose evicted rows the store must have acknowledged before the fetch is sent.
FETCH_AFTER = "fetch_after"
#: Hazard: the batch whose use of the leaving rows must be over before their slots are read or reused (evict_after).
EVICT_AFTER = "evict_after"


def prefetch(
    *,
    prefetch_depth: int,
    read_ahead: int,
    write_depth: int,
    microbatches: int = 1,
    train: bool = True,
    direct: bool = False,
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

    Raises:
        ScheduleError: a depth or the number of micro-batches is below 1.
    """
    for name, value in (
        ("prefetch_depth", prefetch_depth),
        ("read_ahead", read_ahead),
        ("write_depth", write_depth),
        ("microbatches", microbatches),
    ):
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, got {value}")
    build = _training if train else _evaluation
    lanes, edges, sink = build(prefetch_depth, read_ahead, write_depth, microbatches, direct)
    return Loop(
        lanes=lanes,
        edges=edges,
        source=(0, "X_READ"),
        sink=(0, sink),
        stages=(Stage(number=0, name="model", micro_per_batch=microbatches),),
        resources=tuple(resource for resource in _RESOURCES if resource.name in lanes),
    )


_RESOURCES = (
    Resource(name="data", kind="cpu"),
    Resource(name="net-in", kind="nic"),
    Resource(name="copy", kind="copy"),
    Resource(name="compute", kind="gpu"),
    Resource(name="net-out", kind="nic"),
)

_Parts = tuple[dict[str, tuple[Template, ...]], tuple[Edge, ...], str]


def _training(prefetch_depth: int, read_ahead: int, write_depth: int, microbatches: int, direct: bool) -> _Parts:
    lanes = {
        "data": (Template(op="X_READ"),),
        "net-in": (Template(op="X_GET"),),
        "copy": (Template(op="X_EVICT"), Template(op="X_PUT")),
        "compute": (
            *(Template(op=op, unit=unit) for unit in range(microbatches) for op in ("F", "B")),
            Template(op="X_UPDATE"),
            Template(op="OPT"),
        ),
        "net-out": (Template(op="X_STORE"),),
    }
    edges = (
        Edge(src="X_READ", dst="X_GET"),
        Edge(src="X_PUT", dst="X_GET", delay=prefetch_depth, kind="capacity"),
        # In direct mode the rows batch b fetches are those batch b-1 left, and eviction b takes them out.
        Edge(src="X_STORE", dst="X_GET", delay=0 if direct else None, kind="hazard", hazard=FETCH_AFTER),
        Edge(src="X_READ", dst="X_EVICT"),
        Edge(src="X_UPDATE", dst="X_EVICT", delay=1 if direct else None, kind="hazard", hazard=EVICT_AFTER),
        Edge(src="X_STORE", dst="X_EVICT", delay=write_depth, kind="capacity"),
        Edge(src="X_GET", dst="X_PUT"),
        Edge(src="X_EVICT", dst="X_PUT"),
        Edge(src="X_PUT", dst="F"),
        Edge(src="F", dst="B"),
        Edge(src="B", dst="X_UPDATE"),
        Edge(src="B", dst="OPT"),
        Edge(src="X_EVICT", dst="X_STORE"),
        Edge(src="OPT", dst="X_READ", delay=read_ahead, kind="capacity"),
    )
    return lanes, edges, "OPT"


def _evaluation(prefetch_depth: int, read_ahead: int, write_depth: int, microbatches: int, direct: bool) -> _Parts:
    lanes = {
        "data": (Template(op="X_READ"),),
        "net-in": (Template(op="X_GET"),),
        "copy": (Template(op="X_PUT"),),
        "compute": tuple(Template(op="F", unit=unit) for unit in range(microbatches)),
    }
    edges = (
        Edge(src="X_READ", dst="X_GET"),
        Edge(src="X_PUT", dst="X_GET", delay=prefetch_depth, kind="capacity"),
        Edge(src="X_GET", dst="X_PUT"),
        Edge(src="F", dst="X_PUT", delay=1 if direct else None, kind="hazard", hazard=EVICT_AFTER),
        Edge(src="X_PUT", dst="F"),
        Edge(src="F", dst="X_READ", delay=read_ahead, kind="capacity"),
    )
    return lanes, edges, "F"
