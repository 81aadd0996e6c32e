"""R6: peak memory of the lanes. It follows from each lane's row, since a lane runs its actions in order.

F  + activations          F of a micro-batch with REC   + inputs
B  - activations          REC                           + activations - inputs
W  - activations          weights                       once per stage and pipe, from the first action to the last
UNSHARD + whole weights   RESHARD - whole weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program

__all__ = ["Memory", "memory_problems", "peak_bytes", "waiting_covariances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that stages hold and lanes have. A stage that is not listed holds 0, a lane has no limit.

    Attributes:
        activation_bytes: per stage, kept from a micro-batch's forward to its backward (W if split).
        input_bytes: per stage, the part of them that a forward keeps if it is recomputed.
        param_bytes: per stage, weights, gradients and optimizer state, of the lane that computes it.
        whole_bytes: per stage, weights that are gathered: of the lane that gathers them.
        budget_bytes: per lane.
    """

    activation_bytes: Mapping[int, float] = field(default_factory=dict)
    input_bytes: Mapping[int, float] = field(default_factory=dict)
    param_bytes: Mapping[int, float] = field(default_factory=dict)
    whole_bytes: Mapping[int, float] = field(default_factory=dict)
    budget_bytes: Mapping[str, float] = field(default_factory=dict)


def peak_bytes(actions: tuple[Action, ...], memory: Memory) -> float:
    """Peak bytes of a lane with these actions."""
    return max((live for _, live in _live_bytes(actions, memory)), default=0)


def _live_bytes(actions: tuple[Action, ...], memory: Memory) -> Iterator[tuple[Action, float]]:
    """(action, bytes held before it frees any), per action."""
    atoms = [atom for action in actions for atom in action.atoms]
    recomputed = {(atom.stage, atom.index, atom.pipe) for atom in atoms if atom.op == "REC"}
    trained = any(OPS[atom.op].role in ("backward", "weight_grad") for atom in atoms)
    computed = {(atom.stage, atom.pipe) for atom in atoms if OPS[atom.op].role != "weights"}
    live = sum(memory.param_bytes.get(stage, 0) for stage, _ in computed)
    for action in actions:
        freed: float = 0
        for atom in action.atoms:
            role = OPS[atom.op].role
            whole = memory.activation_bytes.get(atom.stage, 0)
            inputs = memory.input_bytes.get(atom.stage, 0)
            if role == "forward":
                kept = inputs if (atom.stage, atom.index, atom.pipe) in recomputed else whole
                live += whole  # all activations exist while the forward runs, even if recomputed later
                freed += whole - (kept if trained else 0)
            elif atom.op == "REC":
                live += whole - inputs
            elif atom.op == "UNSHARD":
                live += memory.whole_bytes.get(atom.stage, 0)
            elif atom.op == "RESHARD":
                freed += memory.whole_bytes.get(atom.stage, 0)
            elif role in ("backward", "weight_grad"):
                freed += whole
        yield action, live
        live -= freed


def waiting_covariances(actions: tuple[Action, ...]) -> tuple[int, int]:
    """Most micro-batches of a lane whose layers' inputs, and whose output gradients, wait for COV_A and for COV_G.

    They are kept until then, whatever a backward frees. Inputs of a recomputed micro-batch exist from its REC on.
    """
    atoms = [atom for action in actions for atom in action.atoms]
    recomputed = {(atom.stage, atom.index) for atom in atoms if atom.op == "REC"}
    measured = {atom.stage for atom in atoms if atom.op == "COV_A"}
    live, peaks = [0, 0], [0, 0]
    for atom in (atom for atom in atoms if atom.stage in measured):
        role = OPS[atom.op].role
        is_kept = role == "forward" and (atom.stage, atom.index) not in recomputed
        live[0] += (is_kept or atom.op == "REC") - (atom.op == "COV_A")
        live[1] += (role in ("backward", "weight_grad")) - (atom.op == "COV_G")
        peaks = [max(pair) for pair in zip(live, peaks, strict=True)]
    return peaks[0], peaks[1]


def memory_problems(program: Program, memory: Memory) -> Iterator[str]:
    """Lanes above their budget, each with its first action that does not fit."""
    for lane, actions in program.lanes.items():
        budget = memory.budget_bytes.get(lane)
        if budget is None:
            continue
        for action, live in _live_bytes(actions, memory):
            if live > budget:
                yield f"lane {lane} holds {live:g} bytes at {action.text}, of {budget:g}"
                break
