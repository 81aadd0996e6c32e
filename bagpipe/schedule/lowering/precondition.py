"""`add_preconditioning`: the second-order work of K-FAC, as actions in the gaps of a synchronous schedule.

    compute lane   F  COV_A …  B  COV_G …  X_EMBED_GRAD  X_INV  PRECOND  OPT         one X_INV per layer of a stage
    reduce lane    REDUCE_GRAD  REDUCE_COV  X_BCAST  X_KL                            lag 0
                   REDUCE_GRAD  X_BCAST  X_KL  REDUCE_COV                            lag 1

    COV_A(m) <- F(m), or REC(m) if it is recomputed       COV_G(m) <- W(m)
    REDUCE_COV(b) <- COV of b                             X_INV(b) <- COV of b - lag, or their REDUCE_COV
    PRECOND(b) <- X_INV(b), REDUCE_GRAD(b) or W of b      X_BCAST(b) <- PRECOND(b)
    X_KL(b) <- PRECOND(b) of all processes                OPT(b) <- PRECOND(b), X_BCAST(b), X_KL(b)

REDUCE_COV and X_BCAST are those of stages that several ranks or pipes hold, which have a REDUCE_GRAD. Every holder of a
stage has its COVs and one X_INV per layer; a rank that does not own a layer does nothing there. COV_As of a stage are
in the order of its forwards, COV_Gs in that of its backwards, X_INVs in that of the layers. All COVs of a batch are
done in the batch. With lag 1, X_INVs of a batch and its COVs alternate, so the sums of two batches are kept.

How long it takes. Let T be the time per batch with PRECOND, X_BCAST and X_KL alone, and REDUCE_COVs that take no time,
C and V the time of COVs and X_INVs of a lane that do not fit, and R the most time of a process's REDUCE_COVs. A batch
takes at most

    T + R + greatest C + V of a lane                  with lag 0, or without X_KL and X_BCAST
    T + R + greatest C + greatest V                   with lag 1 and X_KL or X_BCAST, which couple the lanes' steps

if every set of stages with the same parameters is in one lane, each process has one lane or nothing is summed, and
links take no time: the schedule of T stays valid with the steps behind the backwards delayed by that much (lag 1: by V,
and what follows them by R + C). With latency, each of the two hops from COV over REDUCE_COV to X_INV adds it. If all
work fits and nothing is summed, a batch takes T.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.costs import Costs, Latency, cost_function
from bagpipe.schedule.analysis.memory import waiting_covariances
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.covariances import StageSet, covariance_edges, covariance_work
from bagpipe.schedule.lowering.optimizer import holders_of, on_reduce_lanes
from bagpipe.schedule.lowering.placement import LanePlacement, place

__all__ = ["Placement", "Preconditioning", "add_preconditioning", "place_preconditioning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preconditioning:
    """Second-order work of the stages of a graph.

    Attributes:
        layers: by stage of the graph, its layers whose gradients are preconditioned. A stage without any is left out,
            or has 0.
        lag: 0: a batch's gradients are preconditioned with the inverses of its own factors. 1: with those of the batch
            before.
        limits: the size of the step is limited over all stages: there are X_KLs.
        summed: factors are summed over the holders of a stage: there are REDUCE_COVs.
    """

    layers: Mapping[int, int]
    lag: int = 0
    limits: bool = False
    summed: bool = False

    def __post_init__(self) -> None:
        if self.lag not in (0, 1):
            raise ScheduleError(f"inverses can be those of the batch or of the one before: lag 0 or 1, got {self.lag}")
        for stage, count in self.layers.items():
            if count < 0:
                raise ScheduleError(f"layers of stage {stage} must be at least 0, got {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the work of a program was put.

    Attributes:
        lanes: by compute lane with such work.
        period_without: time per batch with PRECOND, X_BCAST and X_KL alone, and REDUCE_COVs that take no time.
        bound: most time per batch; see the module, which says when it holds.
        inputs_kept: by lane, most micro-batches of its stages that are computed and whose COV_A is not done: their
            layers' inputs are kept, by the graph of their backward or for COV_A alone.
        gradients_kept: the same of backwards and COV_G.
    """

    lanes: Mapping[str, LanePlacement]
    period_without: float
    bound: float
    inputs_kept: Mapping[str, int]
    gradients_kept: Mapping[str, int]


def add_preconditioning(
    program: Program,
    home: Mapping[str, int],
    work: Preconditioning,
    costs: Costs | None = None,
    *,
    latency: Latency = 0,
    before_steps: bool = False,
) -> Program:
    """The program with the actions of K-FAC; for the arguments see `place_preconditioning`."""
    return place_preconditioning(program, home, work, costs, latency=latency, before_steps=before_steps)[0]


def place_preconditioning(
    program: Program,
    home: Mapping[str, int],
    work: Preconditioning,
    costs: Costs | None = None,
    *,
    latency: Latency = 0,
    before_steps: bool = False,
) -> tuple[Program, Placement]:
    """The program with the actions of K-FAC, and where they were put.

    Args:
        program: one batch of a synchronous program with flat pipes, with OPTs, and with REDUCE_GRADs where several
            ranks hold a stage; without messages, gathers and divided steps.
        home: lane -> the process that runs it.
        work: what the stages precondition.
        costs: see `costs`.
        latency: between lanes.
        before_steps: covariances come before the step with a lag too: forwards of the next batch precede it.

    Raises:
        ScheduleError: the program is not such a one, or no stage has layers.
    """
    sets = _sets(program, home, work)
    layers = {each.number: each.layers for each in sets}
    program = dataclasses.replace(
        program, stages=tuple(dataclasses.replace(s, layers=layers.get(s.number, 1)) for s in program.stages)
    )
    whole = _with_steps(program, home, work, sets)
    alone = dataclasses.replace(whole, edges=(*whole.edges, *_edges_of_sums(sets, lag=work.lag, alone=True)))
    items = covariance_work(program, sets, lag=work.lag, before_steps=before_steps)
    found = place(alone, items, _without_sums(costs), latency=latency)
    lanes = {lane: found.lanes[lane] if lane in found.placements else row for lane, row in whole.lanes.items()}
    edges = (
        *whole.edges,
        *_edges_of_sums(sets, lag=work.lag, alone=False),
        *covariance_edges(program, sets, lag=work.lag, before_steps=before_steps),
    )
    kept = {lane: waiting_covariances(lanes[lane]) for lane in found.placements}
    placement = Placement(
        lanes=found.placements,
        period_without=found.period,
        bound=found.period + _longest(whole, found.placements.values(), work.lag, cost_function(costs)),
        inputs_kept={lane: inputs for lane, (inputs, _) in kept.items()},
        gradients_kept={lane: gradients for lane, (_, gradients) in kept.items()},
    )
    return dataclasses.replace(whole, lanes=lanes, edges=edges), placement


def _longest(program: Program, lanes: Iterable[LanePlacement], lag: int, cost: Callable[[Action], float]) -> float:
    """The time by which a batch can be longer."""
    sums = max(sum(cost(a) for a in row if a.op == "REDUCE_COV") for row in program.lanes.values())
    unfit = [(lane.unfit_covariances, lane.unfit_inverses) for lane in lanes]
    if lag and any(atom.op in ("X_KL", "X_BCAST") for atom in program.atoms()):
        return sums + max(covariances for covariances, _ in unfit) + max(inverses for _, inverses in unfit)
    return sums + max(map(sum, unfit))


def _sets(program: Program, home: Mapping[str, int], work: Preconditioning) -> list[StageSet]:
    """The sets of stages with layers, in the order of `holders_of`."""
    ops = {atom.op for atom in program.atoms()}
    if program.semantics != "sync":
        raise ScheduleError(f"preconditioning needs a synchronous program, got one of semantics {program.semantics}")
    if program.num_batches() != 1 or "OPT" not in ops or any(atom.pipe for atom in program.atoms()):
        raise ScheduleError("preconditioning needs a program of one batch with optimizer steps and flat pipes")
    if present := ops & {"PRECOND", "COV_A", "COV_G", "X_INV"}:
        raise ScheduleError(f"the program has {min(present)} actions already")
    parameters = {stage.number: stage.parameters for stage in program.stages}
    if unknown := [stage for stage in work.layers if stage not in parameters.values()]:
        raise ScheduleError(f"layers are given for stage {unknown[0]}, which the program does not have")
    reduced = {atom.stage for atom in program.atoms() if atom.op == "REDUCE_GRAD"}
    found = []
    for holders in holders_of(program, home):
        first = holders[0].stage
        layers = work.layers.get(parameters[first], 0)
        if layers:
            is_shared = first in reduced
            found.append(
                StageSet(holders=holders, layers=layers, is_shared=is_shared, is_summed=is_shared and work.summed)
            )
    if not found:
        raise ScheduleError("no stage has a layer whose gradients can be preconditioned")
    return found


def _without_sums(costs: Costs | None) -> Costs | None:
    """The costs, with REDUCE_COVs that take no time."""
    if costs is None or not callable(costs):
        return {key: cost for key, cost in (costs or {}).items() if "REDUCE_COV" not in key} | {"REDUCE_COV": 0}
    return lambda action: 0 if action.op == "REDUCE_COV" else costs(action)


def _edges_of_sums(sets: Sequence[StageSet], *, lag: int, alone: bool) -> Iterator[Edge]:
    """Edges into REDUCE_COVs, from covariances, or from their sources if they are not in the program yet."""
    for each in (each for each in sets if each.is_summed):
        for stage in each.stages:
            for op in ("W",) if alone else ("COV_A", "COV_G"):
                yield Edge(src=op, src_stage=stage, dst="REDUCE_COV", dst_stage=each.number)
        if alone:
            yield Edge(src="REDUCE_COV", src_stage=each.number, dst="PRECOND", dst_stage=each.number, delay=lag)


def _with_steps(program: Program, home: Mapping[str, int], work: Preconditioning, sets: Sequence[StageSet]) -> Program:
    """The program with PRECOND, X_BCAST, X_KL and REDUCE_COV."""
    program = _with_preconds(program, sets)
    shared = [each for each in sets if each.is_shared]
    summed = [each.holders for each in sets if each.is_summed]
    of_broadcasts = [
        Edge(src=src, src_stage=each.number, dst=dst, dst_stage=each.number)
        for each in shared
        for src, dst in (("PRECOND", "X_BCAST"), ("X_BCAST", "OPT"))
    ]
    if not work.lag:
        program = on_reduce_lanes(program, home, summed, "REDUCE_COV", ())
    program = on_reduce_lanes(program, home, [each.holders for each in shared], "X_BCAST", of_broadcasts)
    if work.limits:
        program = _with_limits(program, home, sets)
    if work.lag:
        program = on_reduce_lanes(program, home, summed, "REDUCE_COV", ())
    return program


def _with_preconds(program: Program, sets: Sequence[StageSet]) -> Program:
    """The program with all PRECONDs of a lane before its OPTs: an X_KL can lie between them."""
    lanes, edges = dict(program.lanes), list(program.edges)
    for lane in dict.fromkeys(each.lane for each in sets):
        steps = (Action(each.number, "PRECOND", 0) for each in sets if each.lane == lane)
        row = lanes[lane]
        first = next(place for place, action in enumerate(row) if action.op == "OPT")
        lanes[lane] = (*row[:first], *steps, *row[first:])
    for each in sets:
        sources = [(each.number, "REDUCE_GRAD")] if each.is_shared else [(stage, "W") for stage in each.stages]
        edges += [Edge(src=op, src_stage=stage, dst="PRECOND", dst_stage=each.number) for stage, op in sources]
        edges.append(Edge(src="PRECOND", src_stage=each.number, dst="OPT", dst_stage=each.number))
    return dataclasses.replace(program, lanes=lanes, edges=tuple(edges))


def _with_limits(program: Program, home: Mapping[str, int], sets: Sequence[StageSet]) -> Program:
    """The program with an X_KL per process that has layers, of its first stage that has."""
    of_process: dict[int, StageSet] = {}
    for each in sets:
        of_process.setdefault(home[each.lane], each)
    edges = []
    for process, limit in of_process.items():
        for each in sets:
            edges.append(Edge(src="PRECOND", src_stage=each.number, dst="X_KL", dst_stage=limit.number))
            if home[each.lane] == process:
                if each.is_shared:
                    edges.append(Edge(src="X_BCAST", src_stage=each.number, dst="X_KL", dst_stage=limit.number))
                edges.append(Edge(src="X_KL", src_stage=limit.number, dst="OPT", dst_stage=each.number))
    return on_reduce_lanes(program, home, [each.holders for each in of_process.values()], "X_KL", edges)
