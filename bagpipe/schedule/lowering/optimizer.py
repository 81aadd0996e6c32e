"""Passes for gradients and the dense optimizer: REDUCE_GRAD, OPT, UNSHARD, once per batch, process, set of parameters.

    compute lane   … B  B  X_EMBED_GRAD  OPT           OPT comes after the lane's last action of the batch
    reduce lane    …          REDUCE_GRAD    UNSHARD   in stage order, so that all processes reduce in the same order

Stages of one process with the same parameters (`Stage.shares`: two pipes) take one of each, those of the first of them.
Where the optimizer's state or gradients are divided among the holders of a stage, each steps its share; UNSHARD gathers
the new parameters before the next forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, OpKey, Program, Resource

__all__ = [
    "Holder",
    "add_optimizer",
    "add_reduce_grad",
    "add_unshard",
    "holders_of",
    "next_uses",
    "on_reduce_lanes",
    "reduce_lane",
]


def reduce_lane(process: int) -> str:
    """Name of the lane with a process's REDUCE_GRADs, UNSHARDs and other exchanges of parameters."""
    return f"reduce{process}"


def add_reduce_grad(program: Program, home: Mapping[str, int]) -> Program:
    """A REDUCE_GRAD per batch, process and set of parameters, on a lane of its own per process.

    Args:
        program: a program with backwards.
        home: lane -> the process that runs it.
    """
    edges = [
        Edge(src="W", src_stage=stage, dst="REDUCE_GRAD", dst_stage=holders[0].stage)
        for holders in holders_of(program, home)
        for stage in _numbers(holders)
    ]
    return on_reduce_lanes(program, home, holders_of(program, home), "REDUCE_GRAD", edges)


def add_optimizer(program: Program, home: Mapping[str, int], order: Loop | None = None) -> Program:
    """An OPT per batch, process and set of parameters, after its REDUCE_GRAD if there is one.

    Args:
        program: a program with backwards.
        home: lane -> the process that runs it.
        order: as of `add_unshard`. The first forward of a batch also comes first in the lane of the OPT, which makes
            the weights that a forward uses before a step.
    """
    reduced = {(atom.stage, atom.pipe) for atom in program.atoms() if atom.op == "REDUCE_GRAD"}
    lanes, edges = dict(program.lanes), list(program.edges)
    for holders in holders_of(program, home):
        first = holders[0]
        for batch in range(program.num_batches()):
            action = Action(first.stage, "OPT", batch, pipe=first.pipe)
            lanes[first.lane] = _after_batch(program, lanes[first.lane], action)
        sources: list[OpKey] = [(stage, "W") for stage in _numbers(holders)]
        if (first.stage, first.pipe) in reduced:
            sources = [(first.stage, "REDUCE_GRAD")]
        edges += [Edge(src=op, src_stage=stage, dst="OPT", dst_stage=first.stage) for stage, op in sources]
        for stage in _numbers(holders)[1:]:  # on another lane, with the same parameters
            edges += next_uses(program, order, (first.stage, "OPT"), stage)
            if order is not None:
                edges.append(Edge(src="F", src_stage=first.stage, dst="F", dst_stage=stage, units=((0, 0),)))
    return dataclasses.replace(program, lanes=lanes, edges=tuple(edges))


def add_unshard(program: Program, home: Mapping[str, int], order: Loop | None = None) -> Program:
    """An UNSHARD per batch, process and set of parameters, between its OPT and the forwards of the next batch.

    In a lane it follows all REDUCE_GRADs of its batch, so that no gather keeps a sum waiting.

    Args:
        program: a program with backwards and OPTs.
        home: lane -> the process that runs it.
        order: in which the lanes compute, if forwards of the next batch precede an OPT (`turns`). The first
            computations after the OPT wait then. None: they precede none.
    """
    edges: list[Edge] = []
    for holders in holders_of(program, home):
        first = holders[0].stage
        edges.append(Edge(src="OPT", src_stage=first, dst="UNSHARD", dst_stage=first))
        for number in _numbers(holders):
            edges += next_uses(program, order, (first, "UNSHARD"), number)
    return on_reduce_lanes(program, home, holders_of(program, home), "UNSHARD", edges)


def next_uses(program: Program, order: Loop | None, step: OpKey, stage: int) -> Iterator[Edge]:
    """Edges from an operation at the end of a batch to what follows it in the lane of a stage.

    Args:
        program: a program with backwards.
        order: as of `add_unshard`. With it the first forward, recomputation and backward of a turn wait: all three,
            because the last turns have no forwards. Without it the forwards of the next batch do.
        step: the operation.
        stage: of the forwards.
    """
    holder, name = step
    if order is None:
        yield Edge(src=name, src_stage=holder, dst="F", dst_stage=stage, delay=1)
        return
    parameters = {each.number: each.parameters for each in program.stages}
    repeated = {atom.index for atom in program.atoms() if atom.op == "REC" and atom.stage == stage}
    own = [template for _, template in order.templates if template.stage == parameters[stage]]
    for op, templates in (
        ("F", [t for t in own if t.op == "F"]),
        ("REC", [t for t in own if t.op == "B" and t.unit in repeated]),
        ("I", [t for t in own if t.op == "B"]),  # a full backward is both halves
    ):
        for t in templates[:1]:
            delay, units = 1 + t.offset, ((0, t.unit),)
            yield Edge(src=name, src_stage=holder, dst=op, dst_stage=stage, delay=delay, units=units)


def on_reduce_lanes(
    program: Program, home: Mapping[str, int], sets: Iterable[Sequence[Holder]], op: str, edges: Iterable[Edge]
) -> Program:
    """The program with an action per batch and set of parameters, behind those of its batch in a reduce lane.

    Args:
        program: a program with backwards.
        home: lane -> the process that runs it.
        sets: of `holders_of`, in its order.
        op: of the actions.
        edges: added with them.
    """
    added: dict[str, list[Action]] = {}
    for holders in sets:
        first = holders[0]
        row = added.setdefault(reduce_lane(home[first.lane]), [])
        row += [Action(first.stage, op, batch, pipe=first.pipe) for batch in range(program.num_batches())]
    rows = {name: tuple(sorted((*program.lanes.get(name, ()), *row), key=_batch)) for name, row in added.items()}
    return dataclasses.replace(
        program,
        lanes={**program.lanes, **rows},
        edges=(*program.edges, *edges),
        resources=(*program.resources, *(Resource(name=n, kind="copy") for n in added if n not in program.lanes)),
    )


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A trained stage of a pipe and the lane of its backwards.

    Attributes:
        pipe, stage: which.
        lane: its name.
    """

    pipe: int
    stage: int
    lane: str


def holders_of(program: Program, home: Mapping[str, int]) -> list[list[Holder]]:
    """Trained stages with the same parameters in the same process; sorted by process, then by parameters."""
    parameters = {stage.number: stage.parameters for stage in program.stages}
    found: dict[tuple[int, int], set[Holder]] = {}
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            if OPS[atom.op].role in ("backward", "weight_grad"):
                key = home[lane], parameters.get(atom.stage, atom.stage)
                found.setdefault(key, set()).add(Holder(atom.pipe, atom.stage, lane))
    return [sorted(found[key]) for key in sorted(found)]


def _numbers(holders: list[Holder]) -> list[int]:
    return list(dict.fromkeys(holder.stage for holder in holders))


def _after_batch(program: Program, row: tuple[Action, ...], action: Action) -> tuple[Action, ...]:
    """The row with `action` after its last action of the same batch."""
    last = max(
        position
        for position, cell in enumerate(row)
        for atom in cell.atoms
        if atom.index is not None
        and atom.index // program.units_per_batch((atom.stage, atom.op), atom.peer) == action.index
    )
    return (*row[: last + 1], action, *row[last + 1 :])


def _batch(action: Action) -> int:
    return action.index or 0
