"""The whole dense part in the one lane that computes: its actions and edges in a training loop.

    declare_dense          F B  F B …                              OPT        row gradients: after the last B
    declare_accumulation   X_EMBED  F B  F B …  X_EMBED_GRAD       OPT        row gradients: after X_EMBED_GRAD
    with K-FAC             F B COV_A COV_G …    REDUCE_GRAD  X_INV  PRECOND  [X_BCAST]  OPT

X_INV of K-FAC is one action for all layers, and what ranks sum of factors is a part of it. X_BCAST is there with
several ranks. PRECOND waits for REDUCE_GRAD and X_INV, OPT for PRECOND and X_BCAST.
"""

from __future__ import annotations

from collections.abc import Iterator

from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import Stage

__all__ = ["declare_accumulation", "declare_dense"]


def declare_dense(
    loop: LoopBuilder, *, microbatches: int = 1, preconditions: bool = False, broadcasts: bool = False
) -> None:
    """Forward, backward and optimizer step of the whole model, in one lane.

    Forwards and backwards of micro-batches alternate, so that one micro-batch's activations are alive at a time.

    Args:
        loop: the loop.
        microbatches: per batch.
        preconditions: with second-order work; see the module.
        broadcasts: of such work: preconditioned gradients are broadcast between ranks.
    """
    loop.stage(Stage(number=0, name="model", micro_per_batch=microbatches))
    loop.lane("compute", *_micro_batches(microbatches, preconditions), *_steps(preconditions, broadcasts))
    loop.edge(Point.ROWS_READY, "F")
    loop.edge("F", "B")
    loop.edge("B", "OPT")
    if preconditions:
        _declare_preconditioning(loop, broadcasts)
    loop.provide(Point.LOOKUP, "F")
    loop.provide(Point.FORWARD, "F")
    loop.provide(Point.GRADIENTS, "B")
    loop.provide(Point.STEP, "OPT")
    loop.provide(Point.WEIGHTS, "OPT")


def declare_accumulation(loop: LoopBuilder, *, microbatches: int) -> None:
    """One optimizer step of the whole model for several micro-batches, in one lane. Their rows are updated together."""
    loop.stage(Stage(number=0, name="model", micro_per_batch=microbatches))
    units = _micro_batches(microbatches, preconditions=False)
    loop.lane("compute", "X_EMBED", *units, "X_EMBED_GRAD", "OPT")
    loop.edge(Point.ROWS_READY, "X_EMBED")
    loop.edge("X_EMBED", "F")
    loop.edge("F", "B")
    loop.edge("B", "X_EMBED_GRAD")
    loop.edge("X_EMBED_GRAD", "OPT")
    loop.provide(Point.LOOKUP, "X_EMBED")
    loop.provide(Point.FORWARD, "F")
    loop.provide(Point.GRADIENTS, "X_EMBED_GRAD")
    loop.provide(Point.STEP, "OPT")
    loop.provide(Point.WEIGHTS, "OPT")


def _micro_batches(count: int, preconditions: bool) -> Iterator[Template]:
    """Forwards and backwards of the whole model, and the covariances that they leave behind."""
    ops = ("F", "B", "COV_A", "COV_G") if preconditions else ("F", "B")
    return (Template(op=op, unit=unit) for unit in range(count) for op in ops)


def _steps(preconditions: bool, broadcasts: bool) -> tuple[str, ...]:
    """Operations behind the backwards of the whole model."""
    if not preconditions:
        return ("OPT",)
    return ("REDUCE_GRAD", "X_INV", "PRECOND", *(["X_BCAST"] if broadcasts else []), "OPT")


def _declare_preconditioning(loop: LoopBuilder, broadcasts: bool) -> None:
    """The edges of K-FAC's work in the lane of the whole model."""
    chain = [("F", "COV_A"), ("B", "COV_G"), ("COV_A", "X_INV"), ("COV_G", "X_INV"), ("B", "REDUCE_GRAD")]
    chain += [("REDUCE_GRAD", "PRECOND"), ("X_INV", "PRECOND"), ("PRECOND", "OPT")]
    if broadcasts:
        chain += [("PRECOND", "X_BCAST"), ("X_BCAST", "OPT")]
    for source, waiting in chain:
        loop.edge(source, waiting)
