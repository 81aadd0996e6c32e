"""The training loop: rows travel from the store to the cache ahead of their batch, and back behind it.

    lane      op           work                    of batch b starts after
    data      X_READ       next batch and plan     the last action of batch b - read_ahead in every compute lane
    net-in    X_FETCH      store -> staging        X_READ(b), X_INSERT(b - prefetch_depth), X_WRITEBACK(fetch_after(b))
    copy      X_EVICT      slots -> staging        X_READ(b), X_WRITEBACK(b - write_depth), X_UPDATE(evict_after(b))
              X_INSERT     staging -> slots        X_FETCH(b), X_EVICT(b)
    compute   F, B         per micro-batch         X_INSERT(b)
              X_UPDATE     once per row and batch  every B of b
              OPT          once per batch          every B of b
    net-out   X_WRITEBACK  staging -> store        X_EVICT(b)

With several ranks a row is in the cache of its owner only, and lanes of their own carry it to the ranks that use it:

    pull      X_PREPULL      rows b - 1 does not use   X_INSERT(b), X_UPDATE(b - 2), X_UPDATE_LATE(b - 2),
                                                       X_UPDATE(ready_after(b))
              X_PULL         rows b - 1 used           X_UPDATE(b - 1)
    compute   F, B, OPT                                X_PULL(b)
              X_UPDATE       rows that b + 1 uses      X_PUSH(b)
    push      X_PUSH         their gradients           every B of b
              X_PUSH_LATE    the other gradients
              X_UPDATE_LATE  their rows
    ack       X_ACK          all ranks' write-backs    X_WRITEBACK(b), X_UPDATE(ready_after(b))

ready_after is the latest evict_after of all ranks. Without it a rank with room could wait in an exchange for a rank
whose rows fit only after the next update, and between two steps no rank could tell that all lanes of all ranks rest.

Only X_PULL, X_PUSH and X_UPDATE stand between two batches' compute. Fetches wait for X_ACK instead of X_WRITEBACK, as
another rank may have written the row; evictions wait for X_UPDATE_LATE too.

Where the norm of row gradients is limited (*clips*), no row is updated before the norm of all of them is known:

    push      X_NORM         sum over all rows         X_PUSH_LATE(b); on one rank in lane compute, after every B of b
    compute   OPT            finds the factor          X_NORM(b)
              X_UPDATE, X_UPDATE_LATE                  OPT(b)

An asynchronous schedule can read rows a batch late (*rows_delay* 1), so that forwards of b + 1 precede backwards of b:
the lookup of b + 1 then comes before X_UPDATE(b) in the lane of both, X_PULL(b) waits for X_UPDATE(b - 2) only, and no
row leaves the cache between the lookup and the update of its batch. Between two turns every stage has made the steps of
the batches before and no other one: in other compute lanes OPT(b) waits for X_TURN(b), with which the turn of b begins.

Where rows expire, X_WRITEBACK(b) deletes rows, too: it waits for the write-backs of b - 1 of all ranks, and those after
b for it (write_after).

With the dense part in stages, the lanes of a `StepProgram` replace F, B and OPT: the first forward that reads rows is
X_EMBED, row gradients are complete after X_EMBED_GRAD.

Every lane performs its own actions for batch 0, 1, 2, …; only the edges order lanes against each other. Evaluation
changes no row, so nothing is evicted to the store: rows that leave are overwritten, once the last forward that reads
them is done, and all rows of a batch can be pulled ahead.

Each part of a loop (`bagpipe.training`) declares its lanes with one function of this module. `prefetch_loop` declares
all parts, for the command line and for checks.
"""

from __future__ import annotations

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.whole_model import declare_dense
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import Stage
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.stage_lanes import stage_lanes

__all__ = [
    "EVICT_AFTER",
    "FETCH_AFTER",
    "READY_AFTER",
    "TURN",
    "WRITE_AFTER",
    "declare_evaluation",
    "declare_evaluation_exchange",
    "declare_evaluation_rows",
    "declare_exchange",
    "declare_reading",
    "declare_rows",
    "declare_stages",
    "declare_update",
    "prefetch_loop",
]

#: Operation that begins a turn, where lanes of the process would otherwise run ahead of it.
TURN = "X_TURN"
#: Hazard: the batch whose evicted rows the store must have acknowledged before the fetch is sent.
FETCH_AFTER = "fetch_after"
#: Hazard: the batch whose use of the leaving rows must be over before their slots are read or reused.
EVICT_AFTER = "evict_after"
#: Hazard: the batch whose update must be done on this rank before every rank can have its rows of a batch.
READY_AFTER = "ready_after"

#: Hazard: the batch that every rank must have written back before the write-back, where rows expire.
WRITE_AFTER = "write_after"


def declare_reading(loop: LoopBuilder) -> None:
    """Batches and their plans enter."""
    loop.lane("data", "X_READ")
    loop.provide(Point.READ, "X_READ")


def declare_rows(
    loop: LoopBuilder,
    *,
    prefetch_depth: int,
    write_depth: int,
    direct: bool = False,
    evict_lag: int | None = None,
    rows_delay: int = 0,
    expires: bool = False,
) -> None:
    """Rows from the store to the cache and back, for training; for the arguments see `prefetch_loop`.

    With `expires`, write-backs delete rows, and wait for those of all ranks as the plan says.
    """
    loop.lane("net-in", "X_FETCH")
    loop.lane("copy", "X_EVICT", "X_INSERT")
    loop.lane("net-out", "X_WRITEBACK")
    loop.provide(Point.ROWS_READY, "X_INSERT")
    loop.provide(Point.STORED, "X_WRITEBACK")
    loop.edge(Point.READ, "X_FETCH")
    loop.capacity("X_INSERT", "X_FETCH", prefetch_depth)
    # In direct mode batch b fetches the rows that batch b-1 left, and eviction b takes them out.
    loop.hazard(Point.STORED, "X_FETCH", FETCH_AFTER, 0 if direct else None)
    loop.edge(Point.READ, "X_EVICT")
    loop.hazard(Point.UPDATE, "X_EVICT", EVICT_AFTER, 1 + rows_delay if direct else evict_lag)
    loop.capacity("X_WRITEBACK", "X_EVICT", write_depth)
    loop.edge("X_FETCH", "X_INSERT")
    loop.edge("X_EVICT", "X_INSERT")
    loop.edge("X_EVICT", "X_WRITEBACK")
    if expires:
        loop.hazard(Point.STORED, "X_WRITEBACK", WRITE_AFTER, 1)


def declare_update(
    loop: LoopBuilder, *, after_steps: bool = False, skips: bool = False, clips: bool = False, rows_delay: int = 0
) -> None:
    """One update per row and batch, where all rows are in this rank's cache.

    Args:
        loop: the loop.
        after_steps: rows wait for the dense steps of their lane, before which gradients of stages are examined.
        skips: the dense steps find out whether the batch is left out, so that no row is updated before.
        clips: the norm of row gradients is limited; see the module.
        rows_delay: updates that a batch's lookup leaves out, besides those of later batches; see the module.
    """
    if clips:
        loop.insert("X_NORM", after=Point.GRADIENTS)
        loop.edge(Point.GRADIENTS, "X_NORM")
        loop.edge("X_NORM", Point.STEP)
    if skips or clips:
        loop.edge(Point.STEP, "X_UPDATE")
    if after_steps or skips or clips:
        loop.append("X_UPDATE", lookups_ahead=rows_delay)
    else:
        loop.insert("X_UPDATE", after=Point.GRADIENTS)
    loop.provide(Point.UPDATE, "X_UPDATE")
    loop.edge(Point.GRADIENTS, "X_UPDATE")


def declare_exchange(
    loop: LoopBuilder,
    *,
    write_depth: int,
    skips: bool = False,
    decays: bool = False,
    clips: bool = False,
    rows_delay: int = 0,
    evict_lag: int | None = None,
) -> None:
    """Rows to the ranks that use them, gradients back to the owners, one update per row and batch there.

    Args:
        loop: the loop.
        write_depth: as of `declare_rows`.
        skips: OPT finds out whether the ranks leave the batch out, so that no row is updated before.
        decays: rows are sent as they are after the decay of the batch before, whose rate is known at its lookup.
        clips: the norm of row gradients is limited; see the module.
        rows_delay: as of `declare_update`.
        evict_lag: see `prefetch_loop`; here of any rank.
    """
    loop.lane("pull", "X_PREPULL", "X_PULL")
    loop.lane("push", "X_PUSH", "X_PUSH_LATE", *(["X_NORM"] if clips else []), "X_UPDATE_LATE")
    loop.lane("ack", "X_ACK")
    # The dense step fills the time in which the gradients travel.
    loop.append("X_UPDATE", lookups_ahead=rows_delay)
    loop.edge(loop.so_far(Point.STORED), "X_ACK")
    loop.edge(loop.so_far(Point.ROWS_READY), "X_PREPULL")
    loop.edge("X_UPDATE", "X_PREPULL", delay=2)
    loop.edge("X_UPDATE_LATE", "X_PREPULL", delay=2)
    loop.edge("X_PREPULL", "X_PULL")
    loop.edge("X_UPDATE", "X_PULL", delay=1 + rows_delay)
    loop.edge(Point.GRADIENTS, "X_PUSH")
    loop.edge(Point.GRADIENTS, "X_UPDATE")
    loop.edge("X_PUSH", "X_UPDATE")
    loop.edge("X_PUSH", "X_PUSH_LATE")
    loop.edge(Point.GRADIENTS, "X_UPDATE_LATE")
    loop.edge("X_PUSH_LATE", "X_UPDATE_LATE")
    if clips:
        loop.edge("X_PUSH_LATE", "X_NORM")
        loop.edge("X_NORM", Point.STEP)
    if skips or clips:
        loop.edge(Point.STEP, "X_UPDATE")
        loop.edge(Point.STEP, "X_UPDATE_LATE")
    if decays:
        loop.edge(Point.LOOKUP, "X_PREPULL", delay=1)
    loop.provide(Point.ROWS_READY, "X_PULL")
    loop.provide(Point.UPDATE, "X_UPDATE", "X_UPDATE_LATE")
    loop.provide(Point.STORED, "X_ACK")
    for op in ("X_ACK", "X_PREPULL"):
        loop.hazard(Point.UPDATE, op, READY_AFTER, evict_lag)
    loop.capacity("X_ACK", Point.READ, loop.read_ahead + write_depth)  # the plan of a batch is kept for so long


def declare_stages(loop: LoopBuilder, step: StepProgram, process: int) -> None:
    """The lanes of one process of a dense part in stages.

    Args:
        loop: the loop.
        step: the stages of a replica.
        process: position of the process in its replica.
    """
    lanes = stage_lanes(step, process)
    loop.stage(*step.program.stages)
    if lanes.paced:
        loop.lane(lanes.main, TURN)
    for name, templates in lanes.lanes.items():
        loop.lane(name, *templates)
    for name, most in lanes.in_flight.items():
        loop.in_flight(name, most)
    loop.edge(Point.ROWS_READY, lanes.embed)
    loop.resolved(lanes.edges)
    if step.turns:  # lanes do actions of a batch before its lookup: it announces no batch to them
        for name, templates in lanes.lanes.items():
            for key in dict.fromkeys(template.key for template in templates if name.startswith("compute")):
                loop.edge(Point.READ, key)
    if lanes.paced:
        loop.edge(Point.READ, TURN)
        for key in lanes.paced:
            loop.edge(TURN, key)
    for key in lanes.last:
        # When a batch's rows are updated, no exchange of its parameters is left: evaluations read both, and exchange
        # parameters themselves (`SteppedRun.rest`).
        loop.edge(key, "X_UPDATE_LATE")
    if loop.has_lane("push"):  # a checkpoint between two batches has the sums of factors
        for key in lanes.sums:
            loop.edge(key, "X_UPDATE_LATE")
    loop.provide(Point.LOOKUP, lanes.embed)
    loop.provide(Point.FORWARD, *lanes.forwards)
    loop.provide(Point.GRADIENTS, lanes.embed_grad)
    if lanes.measures:
        loop.provide(Point.SUMMED, *lanes.measures)
    loop.provide(Point.STEP, *lanes.steps)
    loop.provide(Point.WEIGHTS, *(lanes.last or lanes.steps))


def declare_evaluation_rows(loop: LoopBuilder, *, prefetch_depth: int, direct: bool = False) -> None:
    """Rows from the store to the cache, for evaluation."""
    loop.lane("net-in", "X_FETCH")
    loop.lane("copy", "X_INSERT")
    loop.provide(Point.ROWS_READY, "X_INSERT")
    loop.edge(Point.READ, "X_FETCH")
    loop.capacity("X_INSERT", "X_FETCH", prefetch_depth)
    loop.edge("X_FETCH", "X_INSERT")
    loop.hazard(Point.LOOKUP, "X_INSERT", EVICT_AFTER, 1 if direct else None)


def declare_evaluation_exchange(loop: LoopBuilder) -> None:
    """Rows to the ranks that use them, for evaluation."""
    loop.lane("pull", "X_PREPULL")
    loop.edge(loop.so_far(Point.ROWS_READY), "X_PREPULL")
    # Rows of batch b arrive where those of b - 2 were.
    loop.capacity(Point.LOOKUP, "X_PREPULL", 2)
    loop.provide(Point.ROWS_READY, "X_PREPULL")


def declare_evaluation(loop: LoopBuilder, *, microbatches: int = 1) -> None:
    """Forward of the whole model."""
    loop.stage(Stage(number=0, name="model", micro_per_batch=microbatches))
    loop.lane("compute", *(Template(op="F", unit=unit) for unit in range(microbatches)))
    loop.edge(Point.ROWS_READY, "F")
    loop.provide(Point.LOOKUP, "F")
    loop.provide(Point.FORWARD, "F")


def prefetch_loop(
    *,
    prefetch_depth: int,
    read_ahead: int,
    write_depth: int,
    microbatches: int = 1,
    train: bool = True,
    direct: bool = False,
    evict_lag: int | None = None,
    ranks: int = 1,
    skips: bool = False,
    clips: bool = False,
    step: StepProgram | None = None,
    process: int = 0,
) -> Loop:
    """The loop of one rank.

    Args:
        prefetch_depth: batches fetched and not yet inserted, at most: number of fetch staging buffers.
        read_ahead: batches read and not yet trained, at most.
        write_depth: batches evicted and not yet stored, at most: number of write staging buffers.
        microbatches: micro-batches per batch.
        train: False: evaluation, forwards only.
        direct: give the hazards the constant delays of direct mode (every row is written back and fetched again) so
            that checks and simulation see them. The runner asks the plan in any case.
        evict_lag: batches from the last use of rows to their eviction, for checks and simulation: 1 where rows of the
            batch just before leave, 2 where they leave from spare slots. None: only the plan says.
        ranks: ranks of the job. With more than one, rows travel between them.
        skips: see `declare_exchange`.
        clips: the norm of row gradients is limited; see the module.
        step: the dense part in stages, trained by this process; None: the model is trained whole.
        process: see `declare_stages`.

    Raises:
        ScheduleError: a depth, the number of micro-batches or of ranks is below 1.
    """
    counts = {
        "prefetch_depth": prefetch_depth,
        "read_ahead": read_ahead,
        "write_depth": write_depth,
        "microbatches": microbatches,
        "ranks": ranks,
    }
    if evict_lag is not None:
        counts["evict_lag"] = evict_lag
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} must be at least 1, got {count}")
    loop = LoopBuilder(read_ahead=read_ahead)
    declare_reading(loop)
    if not train:
        declare_evaluation_rows(loop, prefetch_depth=prefetch_depth, direct=direct)
        if ranks > 1:
            declare_evaluation_exchange(loop)
        declare_evaluation(loop, microbatches=microbatches)
        return loop.build().loop
    delay = 0 if step is None else step.rows_delay
    declare_rows(
        loop,
        prefetch_depth=prefetch_depth,
        write_depth=write_depth,
        direct=direct,
        evict_lag=evict_lag,
        rows_delay=delay,
    )
    if ranks > 1:
        declare_exchange(loop, write_depth=write_depth, skips=skips, clips=clips, rows_delay=delay, evict_lag=evict_lag)
    else:
        declare_update(loop, after_steps=step is not None, skips=skips, clips=clips, rows_delay=delay)
    if step is None:
        declare_dense(loop, microbatches=microbatches)
    else:
        declare_stages(loop, step, process)
    return loop.build().loop
