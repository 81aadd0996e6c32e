"""Lowering: from a builder's compute rows to all that a rank does. Each pass is a pure function, Program -> Program.

    flatten_pipes ─> add_recompute ─> add_reduce_grad ─> add_optimizer ─> add_sends ─> defer_receives
    merge_input_weight, add_unshard_reshard: for tables exchanged with PyTorch

A pass does one thing and leaves the rest as it is; the checker reads whatever comes out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.sends import add_sends, defer_receives

__all__ = [
    "PASSES",
    "add_optimizer",
    "add_recompute",
    "add_reduce_grad",
    "add_sends",
    "add_unshard_reshard",
    "defer_receives",
    "flatten_pipes",
    "merge_input_weight",
]


def flatten_pipes(program: Program) -> Program:
    """Every stage of every pipe a stage of its own: stage s of pipe p becomes ``p * S + s``, S the number of stages.

    Edges and stages are there once per pipe; no action names a pipe any more.

    Raises:
        ScheduleError: the stages are not numbered from 0 without a gap.
    """
    numbers = {stage.number for stage in program.stages} | {atom.stage for atom in program.atoms()}
    size = len(numbers)
    if numbers != set(range(size)):
        raise ScheduleError(f"expected stages 0 to {size - 1}, got {sorted(numbers)}")
    pipes = range(1 + max((atom.pipe for atom in program.atoms()), default=0))

    def flat(atom: Action) -> Action:
        first = atom.pipe * size
        peer = None if atom.peer is None else first + atom.peer
        return dataclasses.replace(atom, stage=first + atom.stage, peer=peer, pipe=0)

    return dataclasses.replace(
        program,
        lanes={
            lane: tuple(_rebuilt(action, [flat(atom) for atom in action.atoms]) for action in actions)
            for lane, actions in program.lanes.items()
        },
        edges=tuple(
            dataclasses.replace(edge, src_stage=pipe * size + edge.src_stage, dst_stage=pipe * size + edge.dst_stage)
            for pipe in pipes
            for edge in program.edges
        ),
        stages=tuple(
            dataclasses.replace(stage, number=pipe * size + stage.number) for pipe in pipes for stage in program.stages
        ),
    )


def _rebuilt(action: Action, atoms: Sequence[Action]) -> Action:
    return dataclasses.replace(action, parts=tuple(atoms)) if action.parts else atoms[0]


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """A REC right before every B or I of the stages: their forwards keep inputs only."""

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        for action in actions:
            for atom in action.atoms:
                if atom.stage in stages and OPS[atom.op].role in ("backward", "input_grad"):
                    yield dataclasses.replace(atom, op="REC", parts=())
            yield action

    edges = [
        edge
        for stage in sorted(stages)
        for edge in (
            Edge(src="F", dst="REC", src_stage=stage, dst_stage=stage),
            Edge(src="REC", dst="I", src_stage=stage, dst_stage=stage),
        )
    ]
    return _with(program, lowered, edges)


def add_reduce_grad(program: Program, stages: Collection[int] | None = None, *, torch_form: bool = False) -> Program:
    """A REDUCE_GRAD right behind the last gradient (B or W) of a stage and batch in its lane.

    Args:
        program: the program.
        stages: which stages; None: all that have gradients.
        torch_form: without index and edges, as PyTorch's tables have it.
    """

    def action(atom: Action, batch: int) -> Action:
        return Action(atom.stage, "REDUCE_GRAD", None if torch_form else batch, pipe=atom.pipe)

    found = _trained(program) if stages is None else sorted(stages)
    edges = [] if torch_form else [Edge(src="W", dst="REDUCE_GRAD", src_stage=s, dst_stage=s) for s in found]
    return _behind_gradients(program, found, action, edges)


def add_optimizer(program: Program, stages: Collection[int] | None = None) -> Program:
    """An OPT behind a stage's REDUCE_GRAD, or its last gradient (B or W) where it has none, once per batch.

    Args:
        program: the program.
        stages: which stages; None: all that have gradients.
    """
    found = _trained(program) if stages is None else sorted(stages)
    reduced = {atom.stage for atom in program.atoms() if atom.op == "REDUCE_GRAD" and atom.index is not None}
    edges = [
        Edge(src="REDUCE_GRAD" if s in reduced else "W", dst="OPT", src_stage=s, dst_stage=s) for s in found
    ]  # fmt: skip
    program = _behind_gradients(
        program,
        [s for s in found if s not in reduced],
        lambda atom, batch: Action(atom.stage, "OPT", batch, pipe=atom.pipe),
        edges,
    )

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        for action in actions:
            yield action
            if action.op == "REDUCE_GRAD" and action.index is not None and action.stage in found:
                yield dataclasses.replace(action, op="OPT")

    return _with(program, lowered)


def _trained(program: Program) -> list[int]:
    return sorted({atom.stage for atom in program.atoms() if OPS[atom.op].role in ("backward", "weight_grad")})


def _behind_gradients(
    program: Program, stages: Collection[int], action: Callable[[Action, int], Action], edges: Iterable[Edge]
) -> Program:
    """The action that (last gradient, batch) asks for, behind the last gradient of the stage, pipe and batch."""

    def batch_of(atom: Action) -> int:
        return (atom.index or 0) // program.units_per_batch((atom.stage, atom.op))

    def is_gradient(atom: Action) -> bool:
        return atom.stage in stages and OPS[atom.op].role in ("backward", "weight_grad")

    left = Counter((atom.stage, atom.pipe, batch_of(atom)) for atom in program.atoms() if is_gradient(atom))

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        for cell in actions:
            yield cell
            for atom in filter(is_gradient, cell.atoms):
                left[atom.stage, atom.pipe, batch_of(atom)] -= 1
                if not left[atom.stage, atom.pipe, batch_of(atom)]:
                    yield action(atom, batch_of(atom))

    return _with(program, lowered, edges)


def merge_input_weight(program: Program) -> Program:
    """I directly followed by its own W becomes B, which may be computed faster than its halves."""

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        before: Action | None = None
        for action in actions:
            if before is not None and before.op == "I" and action == dataclasses.replace(before, op="W"):
                before = dataclasses.replace(before, op="B")
                continue
            if before is not None:
                yield before
            before = action
        if before is not None:
            yield before

    return _with(program, lowered)


def add_unshard_reshard(program: Program, max_active_stages: int = 3) -> Program:
    """UNSHARD before a stage's parameters are needed and RESHARD when others need the room, for sharded parameters.

    Each lane holds the next `max_active_stages` different stages of its row at most (PyTorch's policy): whole actions
    decide, so an overlap may bring one more.

    Raises:
        ScheduleError: max_active_stages is below 1.
    """
    if max_active_stages < 1:
        raise ScheduleError(f"active stages must be at least 1, got {max_active_stages}")

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        row = tuple(actions)
        active: list[int] = []
        for action, wanted in zip(row, _next_stages(row, max_active_stages), strict=True):
            for stage in sorted(set(active) - set(wanted)):
                active.remove(stage)
                yield Action(stage, "RESHARD")
            for stage in wanted:
                if stage not in active:
                    active.append(stage)
                    yield Action(stage, "UNSHARD")
            yield action
        yield from (Action(stage, "RESHARD") for stage in sorted(active))

    return _with(program, lowered)


def _next_stages(row: Sequence[Action], count: int) -> list[tuple[int, ...]]:
    """Per place of a row, the next `count` different stages from there on, in the order in which they come."""
    found: list[tuple[int, ...]] = []
    wanted: list[tuple[int, ...]] = []  # stages of an action, that of the row's next actions behind, no stage twice
    for action in reversed(row):
        own = tuple(dict.fromkeys(atom.stage for atom in action.atoms))
        behind = [tuple(stage for stage in stages if stage not in own) for stages in wanted]
        wanted = [own, *(stages for stages in behind if stages)]
        taken: list[int] = []
        for stages in wanted:
            if len(taken) >= count:
                break
            taken += stages
        found.append(tuple(taken))
    return found[::-1]


def _with(
    program: Program, lowered: Callable[[Iterable[Action]], Iterable[Action]], edges: Iterable[Edge] = ()
) -> Program:
    """The program with every lane lowered, and more edges; one that is there already is not added again."""
    return dataclasses.replace(
        program,
        lanes={lane: tuple(lowered(actions)) for lane, actions in program.lanes.items()},
        edges=tuple(dict.fromkeys((*program.edges, *edges))),
    )


#: Every pass by name.
PASSES: Mapping[str, Callable[..., Program]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        flatten_pipes,
        add_recompute,
        add_reduce_grad,
        add_optimizer,
        add_sends,
        defer_receives,
        merge_input_weight,
        add_unshard_reshard,
    )
}
