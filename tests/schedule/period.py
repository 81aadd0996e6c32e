"""The steady-state period of a loop without simulation: its maximum cycle ratio.

    period = max over cycles of (cost of the cycle's actions) / (batches of delay on the cycle)

(Reiter 1968; Ramamoorthy and Ho 1980.) A lane's own order is a cycle of delay 1, so the period is at least the load of
the busiest lane; capacity and hazard edges add cycles through several lanes. The search starts from a guess and raises
it to the ratio of any cycle that exceeds it until none does (Lawler 1976): exact for int and Fraction costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.cycles import delay_free_cycle, positive_cycle
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.ops import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Time per batch in steady state, and the critical cycle of templates (lane, text)."""

    value: Fraction
    cycle: tuple[tuple[str, str], ...]


def default_cost(template: Template) -> int:
    """Cost of the op from the table."""
    return OPS[template.op].cost


def period(loop: Loop, cost: Callable[[Template], float] = default_cost) -> Period:
    """Steady-state time per batch of a live loop with constant costs and no latency.

    Args:
        loop: its hazards count with their constant delay, if they have one.
        cost: template -> duration, at least 0.

    Raises:
        ScheduleError: the loop deadlocks.
    """
    blocked = delay_free_cycle(loop)
    if blocked:
        raise ScheduleError(f"deadlock: {' waits for '.join(loop.templates[n][1].text for n in blocked)}")
    dependencies = loop.dependencies()
    costs = [Fraction(cost(template)) for _, template in loop.templates]
    ratio, best = Fraction(0), ()  # type: tuple[Fraction, Sequence[LoopDependency]]
    while True:
        cycle = positive_cycle(dependencies, [costs[d.src] - ratio * d.turns for d in dependencies], len(costs))
        if not cycle:
            names = tuple((loop.templates[d.src][0], loop.templates[d.src][1].text) for d in best)
            return Period(value=ratio, cycle=names)
        best = cycle
        ratio = Fraction(sum(costs[d.src] for d in cycle)) / sum(d.turns for d in cycle)
