"""The rule of K-FAC: inverses are of all covariances of a batch, and precondition gradients before the optimizer steps.

    COV_A(all m), COV_G(all m) ─edge─> [REDUCE_COV ─edge─>] X_INV(all layers) ─edge─> PRECOND ─edge─> OPT

COV_A and COV_G of a stage come together, once per micro-batch (rule *complete*). X_INV and PRECOND of a stage are in
the lane that steps it. Lanes that hold the same parameters exchange their gradients and factors in one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from bagpipe.schedule.analysis.residency import crossed_exchanges
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import OpKey, Program

__all__ = ["factor_problems"]

#: What is done with factors, in order; covariances are added by stages, the others by the first stage of a set.
_CHAIN = ("X_INV", "PRECOND", "OPT")
_COVARIANCES = ("COV_A", "COV_G")


def factor_problems(program: Program) -> Iterator[str]:
    """Violations."""
    lanes: dict[OpKey, str] = {}
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            lanes.setdefault((atom.stage, atom.op), lane)
    if not any(op in ("X_INV", *_COVARIANCES) for _, op in lanes):
        return
    after: dict[OpKey, set[OpKey]] = {}
    for edge in program.edges:
        after.setdefault(edge.src_key, set()).add(edge.dst_key)
    for stage, op in lanes:
        if op in _COVARIANCES:
            other = _COVARIANCES[op == "COV_A"]
            if (stage, other) not in lanes:
                yield f"stage {stage} has {op} and no {other}"
            elif not any(OPS[taker].unit == "layer" for _, taker in _takers(after, (stage, op))):
                yield f"no X_INV waits for {stage}{op}"
    for stage in (stage for stage, op in lanes if op == "X_INV"):
        for before, behind in itertools.pairwise(_CHAIN):
            if (stage, behind) not in lanes:
                yield f"stage {stage} has {before} and no {behind}"
            elif (stage, behind) not in after.get((stage, before), ()):
                yield f"{stage}{behind} does not wait for {stage}{before}"
        if lanes.get((stage, "OPT"), lanes[stage, "X_INV"]) != lanes[stage, "X_INV"]:
            yield f"{stage}X_INV is on lane {lanes[stage, 'X_INV']}, {stage}OPT on {lanes[stage, 'OPT']}"
    yield from _descending(program)
    yield from crossed_exchanges(program, ("REDUCE_GRAD", "REDUCE_COV", "X_BCAST"))


def _takers(after: dict[OpKey, set[OpKey]], key: OpKey) -> set[OpKey]:
    """The ops that wait for one, directly or through a REDUCE_COV."""
    direct = after.get(key, set())
    return direct.union(*(after.get(taker, set()) for taker in direct if taker[1] == "REDUCE_COV"))


def _descending(program: Program) -> Iterator[str]:
    """Inverses of a stage are in the order of its layers."""
    last: dict[int, Action] = {}
    for atom in (atom for atom in program.atoms() if atom.op == "X_INV"):
        before = last.setdefault(atom.stage, atom)
        if (before.index or 0) > (atom.index or 0):
            yield f"{atom.text} comes after {before.text}"
        last[atom.stage] = atom
