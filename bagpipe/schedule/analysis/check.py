"""Whether a program is valid: all its rules, no deadlock, enough memory.

    check(program)     runs every rule of RULES and asks for a topological order, raises at the first complaint
    check_loop(loop)   the same on enough unrolled batches, and the rules of LOOP_RULES, exact for any number of batches

A loop deadlocks if and only if some cycle of its dependencies carries no delay: then an action waits for itself, now
or in a later turn. (Commoner et al. 1971, marked graphs: live iff every cycle holds a token.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.memory import Memory, memory_problems
from bagpipe.schedule.analysis.period import delay_free_cycle
from bagpipe.schedule.analysis.rules import RULES, Rule
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Hazards, Program

__all__ = ["LOOP_RULES", "RULES", "Rule", "check", "check_loop", "in_flight", "problems"]


def problems(program: Program, rules: Sequence[Rule[Program]] = RULES) -> list[str]:
    """Everything the rules find, as ``rule: complaint``; empty if the program is valid but for deadlock."""
    return [f"{rule.name}: {complaint}" for rule in rules for complaint in rule.complaints(program)]


def _rules_but(*names: str) -> list[Rule[Program]]:
    return [rule for rule in RULES if rule.name not in names]


def check(
    program: Program, hazards: Hazards | None = None, *, memory: Memory | None = None, tagged: bool = False
) -> None:
    """Check every rule, that lane order and dependencies have no cycle (R3), and that memory suffices (R6).

    Args:
        program: the program.
        hazards: what the plan says, if there is one; see `Graph`.
        memory: what stages hold and lanes have; None: not asked.
        tagged: the transport tells messages by tag, so only those of one edge must keep their order.

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

    A loop is one process's share: what it sends is received by others, so sends and receives are not matched here but
    by `check` of the whole program.

    Raises:
        ScheduleError: the first complaint.
    """
    # Two batches show every rule about units and order; delays and deadlock are the exact rules below.
    for complaint in problems(loop.unroll(2), _rules_but("pairs")):
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
