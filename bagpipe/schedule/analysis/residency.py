"""The rule of divided parameters: what computes a stage has whole ones, what steps it has its share.

    UNSHARD k ──> F, B, I, W, REC of its run ──> RESHARD k ──> UNSHARD k + 1 …       ──> OPT(b) ──> UNSHARD of b + 1
    without RESHARDs (whole parameters, divided steps):   OPT(b) ──> UNSHARD(b) ──> F(b + 1), and all else after OPT(b)

Arrows are dependencies of the program, direct or by the order of a lane. Lanes that hold the same parameters must
gather and reduce in one order, since these actions are exchanges among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program

__all__ = ["crossed_exchanges", "residency_problems"]

_USES = ("forward", "backward", "input_grad", "weight_grad")


def residency_problems(program: Program) -> Iterator[str]:
    """Violations."""
    ops = {atom.op for atom in program.atoms()}
    if "UNSHARD" not in ops:
        return
    if any(atom.op == "UNSHARD" and atom.index is None for atom in program.atoms()):
        for lane, actions in program.lanes.items():
            yield from _in_one_lane(lane, actions)
        return
    yield from crossed_exchanges(program, ("UNSHARD", "REDUCE_GRAD"))
    try:
        graph = Graph(program)
    except ScheduleError:
        return  # other rules, and the order, say what is missing
    if "RESHARD" in ops:
        yield from _between(program, graph)
    else:
        yield from _after_steps(program, graph)


def _is_use(atom: Action) -> bool:
    return OPS[atom.op].role in _USES or atom.op == "REC"


def _in_one_lane(lane: str, actions: tuple[Action, ...]) -> Iterator[str]:
    """Tables exchanged with PyTorch gather in the lane that computes."""
    whole: set[int] = set()
    for atom in (atom for action in actions for atom in action.atoms):
        if atom.op in ("UNSHARD", "RESHARD"):
            if (atom.stage in whole) == (atom.op == "UNSHARD"):
                yield f"lane {lane}: {atom.text} of a stage that is {'whole' if atom.stage in whole else 'not whole'}"
            whole ^= {atom.stage}
        elif _is_use(atom) and atom.stage not in whole:
            yield f"lane {lane}: {atom.text} comes before {atom.stage}UNSHARD"


def crossed_exchanges(program: Program, ops: Collection[str]) -> Iterator[str]:
    """Exchanges of parameters that several lanes hold, in orders that differ."""
    parameters = {stage.number: stage.parameters for stage in program.stages}
    exchanges: dict[str, list[tuple[int, str, int | None]]] = defaultdict(list)
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            if atom.op in ops:
                exchanges[lane].append((parameters.get(atom.stage, atom.stage), atom.op, atom.index))
    lanes = sorted(exchanges)
    for number, lane in enumerate(lanes):
        for other in lanes[number + 1 :]:
            both = {held for held, _, _ in exchanges[lane]} & {held for held, _, _ in exchanges[other]}
            orders = [[step for step in exchanges[each] if step[0] in both] for each in (lane, other)]
            for first, second in zip(*orders, strict=False):
                if first != second:
                    yield (
                        f"lanes {lane} and {other} hold the same parameters, and the one comes to "
                        f"{first[1]}{first[2]} of stage {first[0]} where the other comes to {second[1]}{second[2]} "
                        f"of stage {second[0]}"
                    )
                    return


def _holder(program: Program) -> Mapping[int, int]:
    """Number of a stage -> number of the stage whose UNSHARDs serve it: in its process, of the same parameters.

    A process is known by the lane of its gathers: the gathers that its uses wait for.
    """
    gathered = {atom.stage for atom in program.atoms() if atom.op == "UNSHARD"}
    found = {stage: stage for stage in gathered}
    for edge in program.edges:
        if edge.src == "UNSHARD":
            found[edge.dst_stage] = edge.src_stage
    return found


def _between(program: Program, graph: Graph) -> Iterator[str]:
    """Uses between their UNSHARD and its RESHARD, OPT after the RESHARD and before the next UNSHARD."""
    holder = _holder(program)
    node_of = {(a.stage, a.op, a.index): n for n, action in enumerate(graph.actions) for a in action.atoms}
    last_use: dict[tuple[int, int | None, str], int] = {}  # node that a RESHARD waits for, by lane
    for node, action in enumerate(graph.actions):
        if action.op == "RESHARD":
            for before in graph.predecessors[node]:
                key = (action.stage, action.index, graph.lane_of[before.node])
                last_use[key] = max(before.node, last_use.get(key, -1))
    whole: dict[str, dict[int, int]] = defaultdict(dict)  # lane -> holder -> gather whose end the lane has seen
    for node, action in enumerate(graph.actions):
        lane = graph.lane_of[node]
        for before in graph.predecessors[node]:
            for atom in graph.actions[before.node].atoms:
                if atom.op == "UNSHARD" and atom.index is not None:
                    seen = whole[lane].get(atom.stage, -1)
                    whole[lane][atom.stage] = max(seen, atom.index)
        for atom in action.atoms:
            if _is_use(atom):
                stage = holder.get(atom.stage, atom.stage)
                gather = whole[lane].get(stage)
                if gather is None:
                    yield f"{atom.text} waits for no UNSHARD of its parameters"
                elif last_use.get((stage, gather, lane), -1) < node:
                    yield f"{stage}RESHARD{gather} does not wait for {atom.text}, which uses the parameters"
            elif atom.op == "OPT" and atom.index is not None:
                yield from _of_step(program, graph, node_of, node, atom)


def _of_step(
    program: Program, graph: Graph, node_of: Mapping[tuple[int, str, int | None], int], node: int, atom: Action
) -> Iterator[str]:
    """OPT of batch b follows the last RESHARD of b, and precedes the first UNSHARD of b + 1."""
    gathers = program.units_per_batch((atom.stage, "RESHARD"))
    batch = atom.index or 0
    last = node_of.get((atom.stage, "RESHARD", (batch + 1) * gathers - 1))
    if last is None:
        return
    waited = [before.node for before in graph.predecessors[node]]
    if not any(graph.lane_of[n] == graph.lane_of[last] and n >= last for n in waited):
        yield f"{atom.text} does not wait for {graph.actions[last].text}"
    following = node_of.get((atom.stage, "UNSHARD", (batch + 1) * gathers))
    if following is not None and node not in {before.node for before in graph.predecessors[following]}:
        yield f"{graph.actions[following].text} does not wait for {atom.text}"


def _after_steps(program: Program, graph: Graph) -> Iterator[str]:
    """An UNSHARD follows the OPT of its batch, and is followed by what the lane computes after that.

    In other lanes with the parameters the next batch follows it.
    """
    holder = _holder(program)
    stepped = {(atom.stage, atom.index) for atom in program.atoms() if atom.op == "OPT"}
    stepping = {(graph.lane_of[n], a.stage) for n, act in enumerate(graph.actions) for a in act.atoms if a.op == "OPT"}
    seen: dict[str, dict[int, int]] = defaultdict(dict)
    latest: dict[tuple[str, int], int] = {}  # OPT of a holder that a lane has done
    for node, action in enumerate(graph.actions):
        lane = graph.lane_of[node]
        before = [atom for b in graph.predecessors[node] for atom in graph.actions[b.node].atoms]
        for atom in before:
            if atom.op == "UNSHARD" and atom.index is not None:
                seen[lane][atom.stage] = max(atom.index, seen[lane].get(atom.stage, -1))
        for atom in action.atoms:
            own = holder.get(atom.stage, -1)
            if atom.op == "UNSHARD" and (atom.stage, atom.index) in stepped:
                if Action(atom.stage, "OPT", atom.index, pipe=atom.pipe) not in before:
                    yield f"{atom.text} does not wait for {atom.stage}OPT{atom.index}"
            elif atom.op == "OPT" and atom.index is not None:
                latest[lane, atom.stage] = atom.index
            elif _is_use(atom) and own >= 0:
                batch = (atom.index or 0) // program.units_per_batch((atom.stage, atom.op))
                needed = latest.get((lane, own), -1) if (lane, own) in stepping else batch - 1
                if seen[lane].get(own, -1) < needed:
                    yield f"{atom.text} does not wait for {own}UNSHARD{needed}"
