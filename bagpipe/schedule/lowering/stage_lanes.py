"""`StageLanes`: the lanes of one process of a `StepProgram`, as templates of a loop.

Overlaps become their parts, one after the other. Receives are posted some computations ahead: a receive only says where
to, and a sender that finds it posted sends without asking first.

A lane that chooses its order has two tracks: backwards, and after them forwards, each with its sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.ops import OPS, Role
from bagpipe.schedule.ir.program import Edge, OpKey
from bagpipe.schedule.ir.step_program import StepProgram

__all__ = ["StageLanes", "lane_templates", "stage_lanes"]

_COMPUTATIONS: tuple[Role, ...] = ("forward", "backward", "input_grad", "weight_grad")
#: Computations by which receives are posted ahead of their turn, at one more buffer each. A step of small stages over
#: gloo takes 6.2 to 6.7 ms with 1, 2 or 4 under 1f1b and 7.4 with none; under gpipe 8.0 with 4 and 8.9 to 9.5 with 1
#: or 2 (benchmarks/pipeline).
_RECEIVES_AHEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLanes:
    """Lanes of one process, with the actions of one batch.

    Attributes:
        lanes: ``compute<k>`` of its pipeline ranks, ``reduce<p>`` where stages are held more than once.
        edges: between actions of this process.
        main: the compute lane of the embedding stage.
        embed, embed_grad: the operations of its embedding stage.
        in_flight: compute lane that chooses its order -> most micro-batches in flight.
        forwards, steps: its forwards and dense optimizer steps, each operation once.
        measures: what examines gradients before all stages agree on a batch; empty: they do not.
        paced: what other lanes could take before the main lane begins the batch's turn: steps of other compute lanes,
            if forwards of a batch precede backwards of the batch before; gathers, if parameters are divided.
        last: the operations after which a batch is over in lanes that gather parameters.
        sums: the operations that sum factors over the holders of a stage (`precondition`).
    """

    lanes: Mapping[str, tuple[Template, ...]]
    edges: tuple[Edge, ...]
    in_flight: Mapping[str, int]
    main: str
    embed: OpKey
    embed_grad: OpKey
    forwards: tuple[OpKey, ...]
    steps: tuple[OpKey, ...]
    measures: tuple[OpKey, ...] = ()
    paced: tuple[OpKey, ...] = ()
    last: tuple[OpKey, ...] = ()
    sums: tuple[OpKey, ...] = ()


def stage_lanes(step: StepProgram, process: int) -> StageLanes:
    """The lanes of a process, the lane of its embedding stage included."""
    names = (*step.lanes_of(process), f"reduce{process}", *step.receiving_lanes_of(process))
    lanes = {name: lane_templates(step, name) for name in names if name in step.program.lanes}
    templates = [template for own in lanes.values() for template in own]
    performed = {(t.stage, op) for t in templates for op in (t.op, *OPS[t.op].provides)}
    number = step.embedding_stages[process].number
    embed = (number, "X_EMBED")
    main = next(lane for lane, own in lanes.items() if embed in (template.key for template in own))
    gathers = tuple(dict.fromkeys(template.key for template in templates if template.op == "UNSHARD"))
    steps = tuple(template.key for template in templates if template.op == "OPT")
    releases = any(template.op == "RESHARD" for template in templates)
    others = [t.key for lane, own in lanes.items() for t in own if lane != main and t.op == "OPT"]
    return StageLanes(
        lanes=lanes,
        edges=tuple(e for e in step.program.edges if e.src_key in performed and e.dst_key in performed),
        in_flight={lane: most for lane, most in step.in_flight.items() if lane in lanes},
        main=main,
        embed=embed,
        embed_grad=(number, "X_EMBED_GRAD"),
        forwards=tuple(dict.fromkeys(template.key for template in templates if template.op == "F")),
        steps=steps,
        measures=tuple(template.key for template in templates if template.op == "X_MEASURE"),
        paced=(*(others if step.turns else ()), *(gathers if releases else ())),
        last=steps if releases else gathers,
        sums=tuple(dict.fromkeys(template.key for template in templates if template.op == "REDUCE_COV")),
    )


def lane_templates(step: StepProgram, lane: str) -> tuple[Template, ...]:
    """The actions of a lane for one turn."""
    found: list[Template] = []
    computed: list[int] = []  # positions of the latest computations
    for template in step.turns.get(lane) or _of_one_batch(step, lane):
        if OPS[template.op].role == "recv" and computed:
            found.insert(computed[0], template)
            computed = [position + 1 for position in computed]
            continue
        if OPS[template.op].role in _COMPUTATIONS:
            computed = [*computed, len(found)][-_RECEIVES_AHEAD:]
        found.append(template)
    return tuple(found)


def _of_one_batch(step: StepProgram, lane: str) -> Iterator[Template]:
    """The actions of a lane that does one batch after the other."""
    for atom in (atom for action in step.program.lanes[lane] for atom in action.atoms):
        track = _track(step, atom) if lane in step.in_flight else None
        yield Template(op=atom.op, stage=atom.stage, unit=atom.index or 0, peer=atom.peer, track=track)


def _track(step: StepProgram, atom: Action) -> int | None:
    """1 for a forward and its sends, 0 for what belongs to a backward, None for what has its place in the turn."""
    if OPS[atom.op].unit != "micro" or atom.stage >= len(step.instances) or atom.op in ("COV_A", "COV_G"):
        return None
    return int(OPS[atom.op].role == "forward" or atom.op in ("SEND_F", "SENDX_F"))
