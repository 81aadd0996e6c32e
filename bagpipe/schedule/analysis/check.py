"""Validity of programs and loops: rules, deadlock, memory. Raises ScheduleError with the first complaint.

    check(program)     every rule of RULES, a topological order, the memory budget
    check_loop(loop)   RULES on unrolled batches; LOOP_RULES, which hold for any number of batches

A loop deadlocks exactly if a cycle of its dependencies carries no delay: an action then waits for itself. (Commoner et
al. 1971, marked graphs: live iff every cycle holds a token.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.cycles import delay_free_cycle
from bagpipe.schedule.analysis.memory import Memory, memory_problems
from bagpipe.schedule.analysis.rules import RULES, Rule
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Hazards, Program

__all__ = ["LOOP_RULES", "RULES", "RUNNER_RULES", "Rule", "check", "check_loop", "in_flight", "problems"]


def problems(program: Program, rules: Sequence[Rule[Program]] = RULES) -> list[str]:
    """All complaints of the rules, as ``rule: complaint``. Deadlock is not among the rules."""
    return [f"{rule.name}: {complaint}" for rule in rules for complaint in rule.complaints(program)]


def _rules_but(*names: str) -> list[Rule[Program]]:
    return [rule for rule in RULES if rule.name not in names]


def check(
    program: Program, hazards: Hazards | None = None, *, memory: Memory | None = None, tagged: bool = False
) -> None:
    """Check every rule, that lane order and dependencies have no cycle (R3), and that memory suffices (R6).

    Args:
        program: the program.
        hazards: the plan's hazards; see `Graph`.
        memory: bytes that stages hold and lanes have; None: no check.
        tagged: the transport matches messages by tag, so only messages of one edge must keep their order.

    Raises:
        ScheduleError: the first complaint.
    """
    for complaint in problems(program, _rules_but("pairs") if tagged else RULES):
        raise ScheduleError(complaint)
    Graph(program, hazards).order()
    for complaint in memory_problems(program, memory) if memory else ():
        raise ScheduleError(f"memory: {complaint}")


def _live(loop: Loop) -> Iterator[str]:
    cycle = delay_free_cycle(loop)
    if cycle:
        names = [loop.templates[number][1].text for number in cycle]
        yield f"{' waits for '.join([*names, names[0]])} without any delay between"


def _follows_source(loop: Loop) -> Iterator[str]:
    """Every op of batch b runs after the source took batch b. Otherwise a lane would run past the end of the data.

    ``behind[n]`` is how many batches template n can be ahead of the source: the shortest path from it.
    """
    templates = loop.templates
    source = f"source {loop.source[0]}{loop.source[1]}"
    behind = {n: 0 for n, (_, template) in enumerate(templates) if template.key == loop.source and template.unit == 0}
    if len(behind) != 1:
        yield f"{source} must be performed once per batch, found {len(behind)}"
        return
    dependencies = loop.dependencies()
    changed = True
    while changed:
        changed = False
        for d in dependencies:
            if d.src in behind:
                ahead = behind[d.src] + templates[d.dst][1].offset - templates[d.src][1].offset + d.turns
                if ahead < behind.get(d.dst, math.inf):
                    behind[d.dst], changed = ahead, True
    for number, (lane, template) in enumerate(templates):
        if behind.get(number, 1) > 0:
            yield f"lane {lane}: {template.text} does not depend on {source}"
            return


def _has_sink(loop: Loop) -> Iterator[str]:
    if loop.sink not in {template.key for _, template in loop.templates}:
        yield f"sink {loop.sink[0]}{loop.sink[1]} is performed by no lane"


def _batch_after_batch(loop: Loop) -> Iterator[str]:
    """A lane ends an op's actions of a batch before it begins those of the next, so that one number tells its progress.

    In turn order, an action of batch b with offset o is in turn b - o.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for number, (_, template) in enumerate(loop.templates):
        places.setdefault(template.text, []).append((-template.offset, number))
    for text, found in places.items():
        first_turn, first_number = min(found)
        if max(found) > (first_turn + 1, first_number):
            yield f"{text} of a batch begins before that of the batch before has ended"


def _one_source(loop: Loop) -> Iterator[str]:
    found = sum(template.key == loop.source for _, template in loop.templates)
    if found != 1:
        yield f"source {loop.source[0]}{loop.source[1]} must be performed once per batch, found {found}"


def _tracks(loop: Loop) -> Iterator[str]:
    """Tracks lie next to each other and count micro-batches upwards: any order of them then ends with all done."""
    for lane, templates in loop.lanes.items():
        free = [(place, t) for place, t in enumerate(templates) if t.track is not None]
        if not free and lane not in loop.in_flight:
            continue
        if not free or loop.in_flight.get(lane, 0) < 1:
            yield f"lane {lane}: {len(free)} actions in tracks and at most {loop.in_flight.get(lane)} in flight"
        elif free[-1][0] - free[0][0] >= len(free):
            yield f"lane {lane}: an action between those of tracks is in none"
        for track in {t.track for _, t in free}:
            units = [t.unit for _, t in free if t.track == track]
            if units != sorted(units):
                yield f"lane {lane}: track {track} has micro-batches in the order {units}"
        if moved := [t.text for _, t in free if t.offset]:
            yield f"lane {lane}: {moved[0]} is in a track and belongs to another batch than its turn"
        if len({t.stage for _, t in free}) > 1:
            yield f"lane {lane}: tracks of several stages"


LOOP_RULES: tuple[Rule[Loop], ...] = (
    Rule("live", "every cycle of dependencies carries a delay", _live),
    Rule("source", "every op depends on the source of the same batch", _follows_source),
    Rule("sink", "some lane performs the sink", _has_sink),
    Rule("tracks", "actions in tracks are those of one stage, in the order of its micro-batches", _tracks),
)

#: What `bagpipe.pipeline` needs to run a loop.
RUNNER_RULES: tuple[Rule[Loop], ...] = (
    *LOOP_RULES,
    Rule("offsets", "the units of an op come batch after batch", _batch_after_batch),
    Rule("source", "the source is performed once per batch", _one_source),
)


def check_loop(loop: Loop, rules: Sequence[Rule[Loop]] = LOOP_RULES) -> None:
    """Check a loop for any number of batches.

    A loop is the share of one process, and other processes receive what it sends. Sends and receives are therefore not
    matched here but by `check` of the whole program.

    Args:
        loop: the loop.
        rules: `LOOP_RULES`, or `RUNNER_RULES` for a loop that the runner executes.

    Raises:
        ScheduleError: the first complaint.
    """
    # These batches show every rule about units, order and versions; `rules` are exact for delays and deadlock.
    for complaint in problems(loop.unroll(loop.ramp()), _rules_but("pairs")):
        raise ScheduleError(complaint)
    for rule in rules:
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
