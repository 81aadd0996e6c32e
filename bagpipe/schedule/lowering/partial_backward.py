"""`cut_backwards`: one batch of a synchronous program without the backwards that are left out.

    BackwardShares, batch ──> program without B, I, W, REC of stages below a micro-batch's cut, and without the messages
                              between two stages of which the first has no backward; OPT, REDUCE_GRAD where it has none

For simulation and pictures: a job keeps the whole program, and the actions that are left out do nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.backward_shares import BackwardShares, backward_shares
from bagpipe.schedule.ir.graph import partner
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph

__all__ = ["cut_backwards", "shares_of_program"]

#: Operations of a micro-batch's backward, and the messages with its gradients.
_BACKWARDS = ("B", "I", "W", "REC")
_SENDS, _RECEIVES = ("SEND_B", "SENDX_B"), ("RECV_B", "RECVX_B")
#: Operations of a stage that need a gradient.
_STEPS = ("OPT", "REDUCE_GRAD")


def shares_of_program(program: Program, shares: Sequence[float], *, seed: int = 0) -> BackwardShares:
    """The rule for one replica of a dense program, with micro-batches as units.

    Args:
        program: compute actions of one batch; its pipes are not flattened.
        shares: see `backward_shares`.
        seed: of the micro-batches' order.

    Raises:
        ScheduleError: the program is not synchronous, or as `backward_shares`; or stages differ in micro-batches.
    """
    if program.semantics != "sync":
        raise ScheduleError(f"partial backwards need a synchronous schedule, got one of semantics {program.semantics}")
    micro = program.micro_per_batch
    graph = StageGraph(
        micro_per_batch=tuple(micro[number] for number in sorted(micro)),
        edges=tuple((e.src_stage, e.dst_stage) for e in program.edges if e.src == e.dst == "F" and not e.delay),
    )
    pipes = 1 + max((atom.pipe for atom in program.atoms()), default=0)
    return backward_shares(shares, graph.order, microbatches=graph.microbatches, pipes=pipes, seed=seed)


def cut_backwards(program: Program, rule: BackwardShares, *, batch: int = 0, replica: int = 0) -> Program:
    """A batch without the backwards that its units leave out.

    Args:
        program: one batch of a synchronous program, lowered or not. With flat pipes and embedding stages, these are
            numbered as `flatten_pipes` and `add_embedding` do.
        rule: of its stages.
        batch: number of the batch, which decides the shares.
        replica: which one the program is of.

    Raises:
        ScheduleError: the program is not synchronous.
    """
    if program.semantics != "sync":
        raise ScheduleError(f"partial backwards need a synchronous program, got one of semantics {program.semantics}")
    num_stages = len(rule.order)

    def computes(stage: int, atom: Action) -> bool:
        pipe = atom.pipe + stage // num_stages
        return rule.computes(stage % num_stages, batch, rule.unit(replica, pipe, atom.index or 0))

    trained = {
        atom.stage % num_stages for atom in program.atoms() if atom.op in _BACKWARDS and computes(atom.stage, atom)
    }

    def is_left(atom: Action) -> bool:
        if atom.op in _BACKWARDS:
            return computes(atom.stage, atom)
        if atom.op in _STEPS:
            return atom.stage % num_stages in trained
        received = partner(atom) if atom.op in _SENDS else atom
        if received.op not in _RECEIVES:
            return True
        # An embedding stage takes whatever there is.
        takes = received.stage < num_stages * rule.pipes
        giver = received.peer if received.peer is not None else received.stage + 1
        return computes(received.stage if takes else giver, received)

    lanes = {
        lane: tuple(left for action in actions for left in _left_of(action, is_left))
        for lane, actions in program.lanes.items()
    }
    present = {
        (atom.stage, op)
        for actions in lanes.values()
        for action in actions
        for atom in action.atoms
        for op in (atom.op, *OPS[atom.op].provides)
    }
    edges = tuple(edge for edge in program.edges if {edge.src_key, edge.dst_key} <= present)
    return dataclasses.replace(program, lanes=lanes, edges=edges, semantics="partial")


def _left_of(action: Action, is_left: Callable[[Action], bool]) -> Sequence[Action]:
    """The remainder of an action: itself, or its other parts if one of them is left out."""
    left = [atom for atom in action.atoms if is_left(atom)]
    return (action,) if len(left) == len(action.atoms) else left
