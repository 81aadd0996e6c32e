"""Costs of actions for the simulator, constant or measured. Times are in any unit.

action text (``0F3``)  >  stage and op (``0F``)  >  op (``F``)  >  default of the op table         precedence
REC: that of the stage's F, unless given as above; in the default table they are equal
an overlap: its own text, then ``OVERLAP_F_B``, then the sum of its parts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS

__all__ = ["Costs", "Latency", "cost_function", "measured_costs"]

#: Durations: a function of the action (called for an overlap's parts), or a mapping as in the module's rule.
Costs = Mapping[str, float] | Callable[[Action], float]

#: Time between an action's finish and its arrival on another lane: a constant, or a function (src action, dst action).
Latency = float | Callable[[Action, Action], float]


def cost_function(costs: Costs | None) -> Callable[[Action], float]:
    """A function of the action, with the op table's defaults.

    Raises:
        ScheduleError: (when called) a cost is negative.
    """

    def of_atom(atom: Action) -> float:
        if callable(costs):
            return costs(atom)
        for like in (atom, replace(atom, op="F")) if atom.op == "REC" else (atom,):
            for key in (like.text, f"{like.stage}{like.op}", like.op):
                if costs and key in costs:
                    return costs[key]
        return OPS[atom.op].cost

    def of_action(action: Action) -> float:
        # A measured overlap can cost more or less than its parts in sequence.
        listed = costs if isinstance(costs, Mapping) and action.parts else {}
        whole = listed.get(action.text, listed.get(action.op))
        cost = sum(of_atom(atom) for atom in action.atoms) if whole is None else whole
        if not cost >= 0:
            raise ScheduleError(f"{action.text}: expected a cost of at least 0, got {cost}")
        return cost

    return of_action


def measured_costs(durations: Mapping[str, list[float]]) -> dict[str, float]:
    """Costs for `simulate` from measured durations per action text, stage and op, or op: the median of each."""
    return {key: sorted(values)[len(values) // 2] for key, values in durations.items() if values}
