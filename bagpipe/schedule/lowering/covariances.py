"""COV_A, COV_G and X_INV of a program: what they wait for, and the work that `place` puts into gaps.

F(m), or REC(m) if it is recomputed ──> COV_A(m) ──┐ of all stages of a set, of batch b - lag
W(m)                                ──> COV_G(m) ──┴─> [REDUCE_COV ─>] X_INV of every layer ──> PRECOND
with lag 1, so that a checkpoint has the sums of the batches before it:  REDUCE_COV, COV of other stages ──> next F
      where forwards of the next batch precede the step, which the checkpoint follows:  REDUCE_COV, COV ──> OPT
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.optimizer import Holder
from bagpipe.schedule.lowering.placement import Work

__all__ = ["StageSet", "covariance_edges", "covariance_work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSet:
    """Stages of a process with the same parameters. The first one has X_INV, PRECOND and OPT.

    Attributes:
        holders: the stages and their lanes.
        layers: layers of each whose gradients are preconditioned.
        is_shared: other ranks, or other pipes, hold the stage too.
        is_summed: factors are summed over them.
    """

    holders: Sequence[Holder]
    layers: int
    is_shared: bool
    is_summed: bool

    @property
    def number(self) -> int:
        """Number of the first stage."""
        return self.holders[0].stage

    @property
    def lane(self) -> str:
        """Lane of the first stage."""
        return self.holders[0].lane

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of all stages."""
        return tuple(dict.fromkeys(holder.stage for holder in self.holders))


def covariance_edges(
    program: Program, sets: Sequence[StageSet], *, lag: int, before_steps: bool = False
) -> Iterator[Edge]:
    """The edges of COV_A, COV_G and X_INV, but for those into REDUCE_COV; arguments as of `covariance_work`."""
    done = _done(program)
    for each in sets:
        for stage in each.stages:
            yield from _input_edges(stage, _indices(done, stage, "F"), _indices(done, stage, "REC"))
            yield Edge(src="W", src_stage=stage, dst="COV_G", dst_stage=stage)
        sources = [(stage, op) for stage in each.stages for op in ("COV_A", "COV_G")]
        if each.is_summed:
            sources = [(each.number, "REDUCE_COV")]
        for stage, op in sources:
            yield Edge(src=op, src_stage=stage, dst="X_INV", dst_stage=each.number, delay=lag)
        if lag and before_steps:
            for stage, op in sources:
                yield Edge(src=op, src_stage=stage, dst="OPT", dst_stage=each.number)
        elif lag:
            for stage, (source, op) in itertools.product(each.stages, sources):
                if op == "REDUCE_COV" or source != stage:
                    yield Edge(src=op, src_stage=source, dst="F", dst_stage=stage, delay=1)
        yield Edge(src="X_INV", src_stage=each.number, dst="PRECOND", dst_stage=each.number)


def _input_edges(stage: int, forwards: Sequence[int], recomputed: Sequence[int]) -> Iterator[Edge]:
    """COV_A of a micro-batch waits for the action that leaves its inputs behind."""
    kept = sorted(set(forwards) - set(recomputed))
    for op, units in (("F", kept), ("REC", sorted(recomputed))):
        if units:
            pairs = tuple((unit, unit) for unit in units) if len(units) < len(forwards) else ()
            yield Edge(src=op, src_stage=stage, dst="COV_A", dst_stage=stage, units=pairs)


def covariance_work(
    program: Program, sets: Sequence[StageSet], *, lag: int, before_steps: bool = False
) -> tuple[Work, ...]:
    """The work to place: COV_A and COV_G of a stage in the order of its forwards and backwards, X_INV by layers.

    Args:
        program: one batch, with flat pipes.
        sets: the stages.
        lag: batches by which inverses are behind.
        before_steps: COV_A and COV_G come before the step with a lag too.
    """
    done = _done(program)
    found: list[Work] = []
    numbers: list[list[int]] = []  # of the covariances, by set
    for each in sets:
        numbers.append([])
        for holder in each.holders:
            made = {atom.index: atom for op in ("F", "REC") for atom in done.get((holder.stage, op), ())}
            inputs = [made[index] for index in _indices(done, holder.stage, "F")]
            gradients = done.get((holder.stage, "B"), []) + done.get((holder.stage, "W"), [])
            wanted = set(gradients)
            gradients = [a for action in program.lanes[holder.lane] for a in action.atoms if a in wanted]
            for op, sources in (("COV_A", inputs), ("COV_G", gradients)):
                for place, source in enumerate(sources):
                    numbers[-1].append(len(found))
                    found.append(
                        Work(
                            action=Action(holder.stage, op, source.index),
                            lane=holder.lane,
                            after=(source,),
                            after_work=(len(found) - 1,) if place else (),
                            before=None if lag and not before_steps else _step(each),
                        )
                    )
    for each, own in zip(sets, numbers, strict=True):
        for layer in range(each.layers):
            before = (len(found) - 1,) if layer else ()
            found.append(
                Work(
                    action=Action(each.number, "X_INV", layer),
                    lane=each.lane,
                    after_work=before if lag else (*own, *before),
                    after_earlier=tuple(own) if lag else (),
                    after_sums=each.is_summed,
                    before=_step(each),
                )
            )
    return tuple(found)


def _step(each: StageSet) -> Action:
    return Action(each.number, "PRECOND", 0)


def _done(program: Program) -> dict[tuple[int, str], list[Action]]:
    """(stage, op) -> its actions, in the order of the lane."""
    found: dict[tuple[int, str], list[Action]] = {}
    for atom in program.atoms():
        found.setdefault((atom.stage, atom.op), []).append(atom)
    return found


def _indices(done: dict[tuple[int, str], list[Action]], stage: int, op: str) -> list[int]:
    return [atom.index or 0 for atom in done.get((stage, op), ())]
