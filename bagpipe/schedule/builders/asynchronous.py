"""Asynchronous schedules: 1F1B that never drains, so that backwards of batch b run beside forwards of later batches.

    rank r, turn b:   for every micro-batch   F(P - 1 - r micro-batches ahead)  B        then OPT of batch b

The minibatch of the papers is one batch: one optimizer step for the sum of its micro-batches, all of which use the same
weights on a stage. Batch b reaches a stage that has ``ceil((P - 1 - r) / M)`` updates to come before those of batch b:
that is its *gap*. With M = 1 it is P - 1 - r, as in the papers; with M >= P - 1 it is 1, and 0 on the last rank.

    name                forward of batch b             backward of batch b
    pipedream           version b - gap                the same                             Narayanan et al. 2019
    pipedream-vertical  version b - gap of rank 0      the same
    pipedream-2bw       version b - 1                  the same                             Narayanan et al. 2021
    spectrain           b - gap, predicted             version b, predicted, both to        Chen et al. 2018, v1
                                                       version b + ahead
    spectrain-v2        b - gap, predicted to b        the same                             v2
    pipeoptim           b - gap, predicted to b        version b                            Guan et al. 2023

Versions below 0 are version 0: at the start the gaps are 0, 1, 2, …, and predictions are that much shorter.
"""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.one_f_one_b import one_f_one_b
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Semantics
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_loop
from bagpipe.schedule.ir.version_lags import VersionLags, version_lags

__all__ = [
    "drained",
    "pipedream",
    "pipedream_2bw",
    "pipedream_vertical",
    "pipeoptim",
    "spectrain",
    "spectrain_v2",
    "version_gap",
]


def version_gap(graph: StageGraph, stage: int) -> int:
    """Updates of a stage between the first forward of a batch and its first backward, in the steady state."""
    return -(-(graph.num_stages - 1 - stage) // graph.microbatches)


def pipedream(graph: StageGraph, chunks: int) -> Loop:
    """The newest version when the batch reaches the stage; kept for its backward. gap + 1 versions."""
    return _loop(graph, "stash", lambda stage: _version(version_gap(graph, stage)))


def pipedream_vertical(graph: StageGraph, chunks: int) -> Loop:
    """The newest version when the batch reaches rank 0, on all ranks. gap + 1 versions of rank 0 everywhere."""
    return _loop(graph, "stash", lambda stage: _version(version_gap(graph, 0)))


def pipedream_2bw(graph: StageGraph, chunks: int) -> Loop:
    """The version before the batch's own, on all ranks: two versions. At least P - 1 micro-batches.

    Version b - 1 is there when batch b begins: B of the last micro-batch of batch b - 2 precedes F of the first of
    batch b in the lane if M >= P - 1 - r.
    """
    if graph.microbatches < graph.num_stages - 1:
        raise ScheduleError(
            f"pipedream-2bw: micro-batches must be at least {graph.num_stages - 1}, one less than the stages, "
            f"got {graph.microbatches}"
        )
    return _loop(graph, "delay", lambda stage: _version(1))


def spectrain(graph: StageGraph, chunks: int) -> Loop:
    """Forward and backward predict the version that the stage has when rank 0 finishes the batch.

    On rank r that is ``floor(r / 2)`` micro-batches after the batch's own last backward.
    """

    def lags(stage: int) -> VersionLags:
        ahead = -(-(stage // 2) // graph.microbatches)
        return VersionLags(forward=-ahead, forward_base=version_gap(graph, stage), backward=-ahead, backward_base=0)

    return _loop(graph, "predict", lags)


def spectrain_v2(graph: StageGraph, chunks: int) -> Loop:
    """The forward predicts the batch's own version; the prediction is kept for its backward."""

    def lags(stage: int) -> VersionLags:
        gap = version_gap(graph, stage)
        return VersionLags(forward=0, forward_base=gap, backward=0, backward_base=gap)

    return _loop(graph, "stash", lags)


def pipeoptim(graph: StageGraph, chunks: int, *, prediction_offset: int = 0) -> Loop:
    """The forward predicts the version that its backward will use, which is the newest then.

    Args:
        graph: the stages.
        chunks: 1.
        prediction_offset: added to the steps of every prediction, of which none is below 0. The authors' code has 1.
    """

    def lags(stage: int) -> VersionLags:
        gap = version_gap(graph, stage)
        return VersionLags(forward=min(gap, -prediction_offset), forward_base=gap, backward=0, backward_base=0)

    return _loop(graph, "predict", lags)


def _version(lag: int) -> VersionLags:
    """The same version in forward and backward."""
    return VersionLags(forward=lag, backward=lag, forward_base=lag, backward_base=lag)


def _loop(graph: StageGraph, semantics: Semantics, lags_of: Callable[[int], VersionLags]) -> Loop:
    """1F1B without a flush, one stage per rank, P - r micro-batches in flight on rank r."""
    keeps = semantics == "stash"
    rows = [_turn(graph, stage, lags_of(stage), keeps=keeps) for stage in range(graph.num_stages)]
    edges = [Edge(src="W", src_stage=s, dst="OPT", dst_stage=s) for s in range(graph.num_stages)]
    predicting = [stage for stage, row in enumerate(rows) if any(t.op == "PRED" for t in row)]
    # A prediction waits for no data. The first one of a batch takes the batch; the others must not run ahead of it.
    edges += [Edge(src="PRED", src_stage=predicting[0], dst="PRED", dst_stage=s) for s in predicting[1:]]
    return dense_loop(graph, rows, semantics=semantics, edges=edges)


def _turn(graph: StageGraph, stage: int, lags: VersionLags, *, keeps: bool) -> tuple[Template, ...]:
    """The actions of one turn of a lane; `keeps`: backwards have the predictions of their forwards."""
    units, ahead = graph.microbatches, graph.num_stages - 1 - stage
    turn: list[Template] = []
    for index in range(units):
        offset, unit = divmod(index + ahead, units)
        if unit == 0 and lags.predicts_forward:
            turn.append(Template(op="PRED", stage=stage, offset=offset, version_lag=lags.forward_base))
        turn.append(Template(op="F", stage=stage, unit=unit, offset=offset, version_lag=lags.forward))
        if index == 0 and not keeps and lags.backward_base > lags.backward:
            turn.append(Template(op="PRED_B", stage=stage, version_lag=lags.backward_base))
        turn.append(Template(op="B", stage=stage, unit=index, version_lag=lags.backward))
    return (*turn, Template(op="OPT", stage=stage))


def drained(graph: StageGraph, loop: Loop) -> Loop:
    """The same weights as in an asynchronous loop, in the order of 1F1B with a flush.

    For training with rows that are read after the updates of the batch before: no forward of batch b + 1 can begin
    before the last backward of batch b. A prediction for a batch to come is made right before the step that ends the
    version it starts from.
    """
    keeps = loop.semantics == "stash"
    actions = one_f_one_b(graph, 1).lanes
    rows: list[tuple[Template, ...]] = []
    for stage, lags in version_lags(loop).items():
        gap, of = lags.forward_base, {"F": lags.forward, "B": lags.backward}
        prediction = [Template(op="PRED", stage=stage, offset=gap, version_lag=gap)] if lags.predicts_forward else []
        second = not keeps and lags.backward_base > lags.backward
        turn = [
            *([] if gap else prediction),
            *([Template(op="PRED_B", stage=stage, version_lag=0)] if second else []),
            *(
                Template(op=action.op, stage=stage, unit=action.index or 0, version_lag=of[action.op])
                for action in actions[f"rank{stage}"]
            ),
            *(prediction if gap else []),
            Template(op="OPT", stage=stage),
        ]
        rows.append(tuple(turn))
    updates = [Edge(src="W", src_stage=s, dst="OPT", dst_stage=s) for s in range(graph.num_stages)]
    return dense_loop(graph, rows, semantics=loop.semantics, edges=updates)
