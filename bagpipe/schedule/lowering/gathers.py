"""`add_gathers`: UNSHARD and RESHARD of stages whose parameters are divided among the ranks that hold them.

    compute0   F0 F0  F2 F2  F4 F4  F6 F6  B6 B6  B4 B4  B2 B2  B0 B0        four stages of a rank, at most two whole
    reduce0    U0 U2    R0 U4  R2 U6              R6 U2  R4 U0  R2   R0      U: UNSHARD, R: RESHARD; and REDUCE_GRADs

A lane looks ahead in its row: the next `active_stages` different stages are whole, or on their way, and what is not
among them is released (PyTorch's rule). All gathers of a process are in one lane, in the order of a simulation with the
default costs. A RESHARD there waits for the last use, and a use waits for its UNSHARD: so that an UNSHARD that comes
behind a RESHARD takes the room that was freed.

A lane that would gather a stage more than twice per batch keeps its stages from first forward to last backward, as
interleaved rows do. So do processes that hold parameters which another lane holds too, in two pipes: all of them then
gather in the order of the stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, OpKey, Program, Resource
from bagpipe.schedule.lowering.optimizer import Holder, holders_of, reduce_lane
from bagpipe.schedule.lowering.rewrite import next_stages

__all__ = ["ACTIVE_STAGES", "add_gathers"]

#: Stages of a lane that are whole: the one that computes, and the next one.
ACTIVE_STAGES = 2
#: Most gathers of a stage per batch: for its forwards, and for its backwards.
_MOST_GATHERS = 2

#: Roles of the ops that use the parameters, and REC.
_USES = ("forward", "backward", "input_grad", "weight_grad")


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """An action of a batch that needs the whole parameters of a stage; `position` in its lane, with its times."""

    lane: str
    position: int
    atom: Action
    start: float
    finish: float


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Cell:
    """UNSHARD, RESHARD or REDUCE_GRAD of parameters, by its order in the lane."""

    time: float
    kind: int
    number: int  # of the parameters
    gather: int = 0


#: Kinds of cells, in their order at equal times: room first, then what a computation waits for.
_OPS = ("RESHARD", "UNSHARD", "REDUCE_GRAD")


def add_gathers(program: Program, home: Mapping[str, int], *, active_stages: int = ACTIVE_STAGES) -> Program:
    """The program with an UNSHARD before, and a RESHARD after, each run of a stage's uses.

    Args:
        program: a synchronous program with backwards; with REDUCE_GRADs and OPTs if it is to have any.
        home: lane -> the process that runs it.
        active_stages: most stages of a lane that have whole parameters, if that needs no third gather.

    Raises:
        ScheduleError: active_stages is below 1, or the program is asynchronous.
    """
    if active_stages < 1:
        raise ScheduleError(f"active stages must be at least 1, got {active_stages}")
    if program.semantics != "sync":
        raise ScheduleError(f"gathers need a synchronous program, got one of semantics {program.semantics}")
    sets = holders_of(program, home)
    uses = _uses(program)
    lanes, edges = dict(program.lanes), list(program.edges)
    resources, gathers = list(program.resources), dict[int, int]()
    for process in dict.fromkeys(home[holders[0].lane] for holders in sets):
        own = [holders for holders in sets if home[holders[0].lane] == process]
        name = reduce_lane(process)
        if name not in lanes:
            resources.append(Resource(name=name, kind="copy"))
        reduced = {action.stage for action in lanes.get(name, ()) if action.op == "REDUCE_GRAD"}
        runs = _runs(program, own, sets, uses, active_stages)
        cells = _cells(own, runs, reduced)
        lanes[name] = tuple(
            _action(own[cell.number][0], cell, batch, len(runs[cell.number]))
            for batch in range(program.num_batches())
            for cell in cells
        )
        for holders, found in zip(own, runs, strict=True):
            gathers[holders[0].stage] = len(found)
            edges += _edges(holders[0].stage, found)
    performed = {(atom.stage, atom.op) for atom in program.atoms()}
    for stage, count in gathers.items():
        if (stage, "OPT") in performed:
            first, last = ((0, 0),), ((count - 1, 0),)
            edges.append(Edge(src="OPT", src_stage=stage, dst="UNSHARD", dst_stage=stage, delay=1, units=first))
            edges.append(Edge(src="RESHARD", src_stage=stage, dst="OPT", dst_stage=stage, units=last))
    return dataclasses.replace(
        program,
        lanes=lanes,
        edges=tuple(edges),
        resources=tuple(resources),
        stages=tuple(dataclasses.replace(s, gathers=gathers.get(s.number, 1)) for s in program.stages),
    )


#: Consecutive uses between an UNSHARD and its RESHARD: the moment of each, and the uses. Moments only order the lane.
_Run = tuple[float, float, tuple[_Use, ...]]


def _uses(program: Program) -> Mapping[str, list[_Use]]:
    """Uses of parameters in the first batch, by lane, in order."""
    timed = iter(simulate(program).timed)
    found: dict[str, list[_Use]] = {}
    for lane, actions in program.lanes.items():
        for position, action in enumerate(actions):
            at = next(timed)
            for atom in action.atoms:
                is_use = OPS[atom.op].role in _USES or atom.op == "REC"
                if is_use and (atom.index or 0) < program.units_per_batch((atom.stage, atom.op)):
                    found.setdefault(lane, []).append(_Use(lane, position, atom, at.start, at.finish))
    return found


def _runs(
    program: Program,
    own: Sequence[Sequence[Holder]],
    sets: Sequence[Sequence[Holder]],
    uses: Mapping[str, list[_Use]],
    active_stages: int,
) -> list[list[_Run]]:
    """Runs of uses of each set of parameters of a process, in order."""
    parameters = {stage.number: stage.parameters for stage in program.stages}
    held = [parameters.get(holders[0].stage, holders[0].stage) for holders in sets]
    is_shared = any(
        held.count(parameters.get(holders[0].stage, holders[0].stage)) > 1 or len({h.lane for h in holders}) > 1
        for holders in own
    )
    if is_shared:
        return [[_kept(holders, uses, end=1.0 + number)] for number, holders in enumerate(own)]
    found: dict[int, list[_Run]] = {}
    for lane in dict.fromkeys(holders[0].lane for holders in own):
        ahead = _looking_ahead(uses[lane], active_stages)
        if any(len(runs) > _MOST_GATHERS for runs in ahead.values()):
            ahead = {stage: [_kept([Holder(0, stage, lane)], uses, end=runs[-1][1])] for stage, runs in ahead.items()}
        found |= ahead
    return [found[holders[0].stage] for holders in own]


def _kept(holders: Iterable[Holder], uses: Mapping[str, list[_Use]], *, end: float) -> _Run:
    """One run of all uses, from the beginning of the batch."""
    stages = {(holder.lane, holder.stage) for holder in holders}
    return 0.0, end, tuple(use for lane, row in uses.items() for use in row if (lane, use.atom.stage) in stages)


def _looking_ahead(row: Sequence[_Use], active_stages: int) -> dict[int, list[_Run]]:
    """Runs of the stages of a lane that has the next so many different stages whole."""
    cells = list(dict.fromkeys(use.position for use in row))
    actions = [tuple(use.atom for use in row if use.position == cell) for cell in cells]
    begun: dict[int, float] = {}
    found: dict[int, list[_Run]] = {}
    taken: dict[int, list[_Use]] = {}
    now = 0.0
    for cell, wanted in zip(cells, next_stages(actions, active_stages), strict=True):
        for stage in sorted(begun.keys() - set(wanted)):
            found.setdefault(stage, []).append((begun.pop(stage), now, tuple(taken.pop(stage))))
        for stage in wanted:
            begun.setdefault(stage, now)
        for use in (use for use in row if use.position == cell):
            taken.setdefault(use.atom.stage, []).append(use)
            now = use.finish
    for stage in sorted(begun):
        found.setdefault(stage, []).append((begun[stage], now, tuple(taken[stage])))
    return found


def _cells(own: Sequence[Sequence[Holder]], runs: Sequence[Sequence[_Run]], reduced: set[int]) -> list[_Cell]:
    """A batch's cells of a process's lane, in order."""
    cells: list[_Cell] = []
    for number, (holders, found) in enumerate(zip(own, runs, strict=True)):
        for gather, (begin, end, _) in enumerate(found):
            cells += [_Cell(begin, 1, number, gather), _Cell(end, 0, number, gather)]
        if holders[0].stage in reduced:
            cells.append(_Cell(found[-1][1], 2, number))
    return sorted(cells)


def _action(holder: Holder, cell: _Cell, batch: int, gathers: int) -> Action:
    index = batch if cell.kind == 2 else batch * gathers + cell.gather
    return Action(holder.stage, _OPS[cell.kind], index, pipe=holder.pipe)


def _edges(stage: int, runs: Sequence[_Run]) -> Iterator[Edge]:
    """Uses wait for their UNSHARD, and a RESHARD for the uses."""
    units: dict[OpKey, list[tuple[int, int]]] = {}
    for gather, (_, _, uses) in enumerate(runs):
        for use in uses:
            op = "I" if use.atom.op == "B" else use.atom.op  # a full backward is both halves
            units.setdefault((use.atom.stage, op), []).append((gather, use.atom.index or 0))
    for (user, op), pairs in units.items():
        before, after = tuple(dict.fromkeys(pairs)), tuple(dict.fromkeys((unit, gather) for gather, unit in pairs))
        yield Edge(src="UNSHARD", src_stage=stage, dst=op, dst_stage=user, units=before)
        yield Edge(src=op, src_stage=user, dst="RESHARD", dst_stage=stage, units=after)
