"""What makes a program valid: a table of rules, each a small function that yields its complaints.

    check(program)     runs every rule of RULES, raises at the first complaint
    check_loop(loop)   the same on enough unrolled batches, and the rules of LOOP_RULES, exact for any number of batches

A loop deadlocks if and only if some cycle of its dependencies carries no delay: then an action waits for itself, now
or in a later turn. (Commoner et al. 1971, marked graphs: live iff every cycle holds a token.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from bagpipe.schedule.actions import Action
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.graph import Graph, partner
from bagpipe.schedule.loop import Loop
from bagpipe.schedule.ops import OPS
from bagpipe.schedule.period import delay_free_cycle
from bagpipe.schedule.program import Hazards, Program

__all__ = ["LOOP_RULES", "RULES", "Rule", "check", "check_loop", "in_flight", "problems"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """One rule: its name, what it demands, and the function that yields what breaks it."""

    name: str
    demand: str
    complaints: Callable[[T], Iterator[str]]


def _edges_connect(program: Program) -> Iterator[str]:
    present = {(a.stage, op) for a in program.atoms() for op in (a.op, *OPS[a.op].provides)}
    for edge in program.edges:
        for key in (edge.src_key, edge.dst_key):
            if present and key not in present:
                yield f"edge {edge.text} names {key[0]}{key[1]}, which no lane performs"


def _complete(program: Program) -> Iterator[str]:
    """R1: per stage and pipe, every op covers 0 … n-1 once; F once per micro-batch; B, or I and W, once per F."""
    indices: dict[tuple[int, int, str], Counter[int]] = defaultdict(Counter)
    num_batches = program.num_batches()
    for atom in program.atoms():
        if atom.index is not None:
            indices[atom.stage, atom.pipe, atom.op][atom.index] += 1
    for (stage, pipe, op), counts in indices.items():
        where = f"{stage}{op}" + (f"~{pipe}" if pipe else "")
        twice = next((index for index, count in sorted(counts.items()) if count > 1), None)
        if twice is not None:
            yield f"{where}{twice} appears {counts[twice]} times"
        if op not in ("B", "I", "W"):  # a micro-batch may take either form of backward; counted together below
            yield from _gap(where, set(counts), num_batches * program.units_per_batch((stage, op)))
    if program.semantics == "partial":
        return
    trained = {(stage, pipe) for stage, pipe, op in indices if op in ("B", "I", "W")}
    for stage, pipe in trained:
        forwards, full = set(indices[stage, pipe, "F"]), set(indices[stage, pipe, "B"])
        for half in ("I", "W"):
            done = set(indices[stage, pipe, half])
            if full & done:
                yield f"stage {stage}: micro-batch {min(full & done)} has both B and {half}"
            if full | done != forwards:
                yield f"stage {stage}: micro-batch {min((full | done) ^ forwards)} must have F and either B or I and W"


def _gap(where: str, found: set[int], expected: int) -> Iterator[str]:
    missing = sorted(set(range(expected)) - found)
    if missing:
        yield f"{where}{missing[0]} is missing; expected {where}0 to {where}{expected - 1}"


_ORDER = (("F", "B"), ("F", "I"), ("F", "REC"), ("REC", "B"), ("REC", "I"), ("I", "W"))


def _lane_order(program: Program) -> Iterator[str]:
    """R2: in a lane, F before its backward, I before W, recomputation between; batch ops after all they need."""
    for lane, actions in program.lanes.items():
        place = {
            (atom.stage, atom.op, atom.index, atom.pipe): position
            for position, action in enumerate(actions)
            for atom in action.atoms
        }
        for (stage, op, index, pipe), position in place.items():
            for first, second in _ORDER:
                if op == second and place.get((stage, first, index, pipe), -1) >= position:
                    yield f"lane {lane}: {stage}{second}{index} comes before {stage}{first}{index}"


def _one_lane(program: Program) -> Iterator[str]:
    """R9: an op of a stage and pipe lives on one lane, which does one action at a time; progress is counted by op."""
    home: dict[tuple[int, str, int], str] = {}
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            other = home.setdefault((atom.stage, atom.op, atom.pipe), lane)
            if other != lane:
                yield f"{atom.stage}{atom.op} is on two lanes, {other} and {lane}"
                return


def _pairs(program: Program) -> Iterator[str]:
    """R4: what one lane sends another, the other receives, in the same order."""
    lane_of = {atom: lane for lane, actions in program.lanes.items() for a in actions for atom in a.atoms}
    sent: dict[tuple[str, str], list[Action]] = defaultdict(list)
    received: dict[tuple[str, str], list[Action]] = defaultdict(list)
    sender_of: dict[Action, str] = {}
    for atom, lane in lane_of.items():
        if OPS[atom.op].role == "send":
            receiver = partner(atom)
            if receiver not in lane_of:
                yield f"{atom.text} has no {receiver.text}"
                return
            sender_of[receiver] = lane
            sent[lane, lane_of[receiver]].append(receiver)
    for atom, lane in lane_of.items():
        if OPS[atom.op].role == "recv":
            if atom not in sender_of:
                yield f"{atom.text} has no SEND"
                return
            received[sender_of[atom], lane].append(atom)
    for pair, order in sent.items():
        for a, b in zip(order, received[pair], strict=True):
            if a != b:
                yield f"lane {pair[0]} sends for {a.text} when lane {pair[1]} expects {b.text}"
                return


def _versions(program: Program) -> Iterator[str]:
    """R7: a synchronous action uses the weights of its own batch, so it may name no other version."""
    if program.semantics != "sync":
        return
    for atom in program.atoms():
        if atom.version is not None and atom.index is not None:
            batch = atom.index // program.units_per_batch((atom.stage, atom.op))
            if atom.version != batch:
                yield f"{atom.text} uses version {atom.version}; in a sync program batch {batch} uses version {batch}"


#: (src, dst) of the row hazards: who touches the same rows must be ordered by the plan.
_ROW_HAZARDS = (("X_STORE", "X_GET"), ("X_ACK", "X_GET"), ("X_UPDATE", "X_EVICT"), ("X_UPDATE_LATE", "X_EVICT"))


def _row_hazards(program: Program) -> Iterator[str]:
    """R8: rows written back may be fetched again, and rows updated may be evicted: both need a hazard edge."""
    present = {atom.op for atom in program.atoms()}
    if "X_ACK" in present:  # it comes after this rank's own X_STORE, and after every other rank's
        present.discard("X_STORE")
    covered = {(edge.src, edge.dst) for edge in program.edges if edge.kind == "hazard" or edge.delay == 0}
    for src, dst in _ROW_HAZARDS:
        if {src, dst} <= present and (src, dst) not in covered:
            yield f"{dst} must wait for {src} by a hazard edge, there is none"


def _whole_gradients(program: Program) -> Iterator[str]:
    """R10: an optimizer acts once per batch and after every backward of it, in lane order or by an edge."""
    if program.semantics != "sync":
        return
    waits = {(edge.src_stage, edge.src, edge.dst_stage, edge.dst) for edge in program.edges if edge.delay == 0}
    for actions in program.lanes.values():
        last: dict[tuple[int, int], tuple[int, Action]] = {}  # (stage, batch) -> place of its last backward
        atoms = [(atom, atom.index) for action in actions for atom in action.atoms]
        for position, (atom, index) in enumerate(atoms):
            if index is not None and OPS[atom.op].role in ("backward", "weight_grad"):
                batch = index // program.units_per_batch((atom.stage, atom.op))
                last[atom.stage, batch] = (position, atom)
        for position, (atom, index) in enumerate(atoms):
            if index is not None and atom.op in ("OPT", "X_UPDATE"):
                place, gradient = last.get((atom.stage, index), (-1, atom))
                if place > position and (gradient.stage, gradient.op, atom.stage, atom.op) not in waits:
                    yield f"{atom.text} comes before {gradient.text} of the same batch"


RULES: tuple[Rule[Program], ...] = (
    Rule("edges", "both ends of every edge are performed by some lane", _edges_connect),
    Rule("complete", "every op covers its batches exactly once", _complete),
    Rule("order", "forward before backward, I before W, in every lane", _lane_order),
    Rule("one-lane", "an op of a stage lives on one lane", _one_lane),
    Rule("pairs", "sends and receives match one to one, in the same order", _pairs),
    Rule("versions", "sync programs use the weights of their own batch", _versions),
    Rule("row-hazards", "row hazards have an edge", _row_hazards),
    Rule("gradients", "optimizers act after every backward of the batch", _whole_gradients),
)


def problems(program: Program) -> list[str]:
    """Everything the rules find, as ``rule: complaint``; empty if the program is valid but for deadlock."""
    return [f"{rule.name}: {complaint}" for rule in RULES for complaint in rule.complaints(program)]


def check(program: Program, hazards: Hazards | None = None) -> None:
    """Check every rule, and that lane order and dependencies have no cycle (R3).

    Args:
        program: the program.
        hazards: what the plan says, if there is one; see `Graph`.

    Raises:
        ScheduleError: the first complaint.
    """
    for complaint in problems(program):
        raise ScheduleError(complaint)
    Graph(program, hazards).order()


def _live(loop: Loop) -> Iterator[str]:
    cycle = delay_free_cycle(loop)
    if cycle:
        names = [loop.templates[number][1].text for number in cycle]
        yield f"{' waits for '.join([*names, names[0]])} without any delay between"


def _follows_source(loop: Loop) -> Iterator[str]:
    """Every op of batch b runs after the source took batch b, or a lane would run past the end of the data."""
    templates = loop.templates
    reached = {number for number, (_, template) in enumerate(templates) if template.key == loop.source}
    if len(reached) != 1:
        yield f"source {loop.source[0]}{loop.source[1]} must be performed once per batch, found {len(reached)}"
        return
    dependencies = loop.dependencies()
    while True:
        more = {d.dst for d in dependencies if d.src in reached and _covers(loop, d.src, d.dst, d.turns)} - reached
        if not more:
            break
        reached |= more
    for number, (lane, template) in enumerate(templates):
        if number not in reached:
            yield f"lane {lane}: {template.text} does not depend on source {loop.source[0]}{loop.source[1]}"
            return


def _covers(loop: Loop, src: int, dst: int, turns: int) -> bool:
    """Whether dst of batch b waits for src of batch b or a later one (ops finish batches in order)."""
    return loop.templates[dst][1].offset - loop.templates[src][1].offset + turns <= 0


def _has_sink(loop: Loop) -> Iterator[str]:
    if loop.sink not in {template.key for _, template in loop.templates}:
        yield f"sink {loop.sink[0]}{loop.sink[1]} is performed by no lane"


def _batches_in_order(loop: Loop) -> Iterator[str]:
    """An op with several units keeps them in one batch: its progress is then one number."""
    offsets: dict[tuple[int, str], int] = {}
    for _, template in loop.templates:
        if offsets.setdefault(template.key, template.offset) != template.offset:
            yield f"{template.text} has different offsets in its units"


LOOP_RULES: tuple[Rule[Loop], ...] = (
    Rule("live", "every cycle of dependencies carries a delay", _live),
    Rule("offsets", "the units of an op share one offset", _batches_in_order),
    Rule("source", "every op depends on the source of the same batch", _follows_source),
    Rule("sink", "some lane performs the sink", _has_sink),
)


def check_loop(loop: Loop) -> None:
    """Check a loop for any number of batches.

    Raises:
        ScheduleError: the first complaint.
    """
    # Two batches show every rule about units and order; delays and deadlock are the exact rules below.
    for complaint in problems(loop.unroll(2)):
        raise ScheduleError(complaint)
    for rule in LOOP_RULES:
        for complaint in rule.complaints(loop):
            raise ScheduleError(f"{rule.name}: {complaint}")


def in_flight(actions: tuple[Action, ...]) -> int:
    """Peak number of forwards in a lane whose backward (B, or W if split) is not done; 0 without backwards."""
    steps = [OPS[atom.op].role for action in actions for atom in action.atoms]
    if not any(role in ("backward", "weight_grad") for role in steps):
        return 0
    live = peak = 0
    for role in steps:
        live += (role == "forward") - (role in ("backward", "weight_grad"))
        peak = max(peak, live)
    return peak
