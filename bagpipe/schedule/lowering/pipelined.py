"""The training loop of one process with its dense stages in it: the prefetch pipeline, its F and B opened up.

    prefetch:   … X_PULL ─> F ─> B ─> X_PUSH …              one stage, one lane
    pipelined:  … X_PULL ─> X_EMBED ─> F0 F1 B0 … ─> X_EMBED_GRAD ─> X_PUSH …    the lanes of a StepProgram in its place

What waited for F waits for X_EMBED, what waited for B waits for X_EMBED_GRAD.
"""

from __future__ import annotations

from dataclasses import replace

from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.ops import OPS, Role
from bagpipe.schedule.ir.program import Edge, Resource
from bagpipe.schedule.ir.step_program import EmbeddingStage, StepProgram

__all__ = ["lane_templates", "pipelined"]

_COMPUTATIONS: tuple[Role, ...] = ("forward", "backward", "input_grad", "weight_grad")
#: Computations by which receives are posted ahead of their turn, at one more buffer each. A step of small stages over
#: gloo takes 6.2 to 6.7 ms with 1, 2 or 4 under 1f1b and 7.4 with none; under gpipe 8.0 with 4 and 8.9 to 9.5 with 1
#: or 2 (benchmarks/pipeline).
_RECEIVES_AHEAD = 4
#: The frame's dense part: what the stages replace.
_DENSE = ("F", "B", "OPT")
_SINK = (0, "X_UPDATE")


def pipelined(frame: Loop, step: StepProgram, process: int, *, read_ahead: int) -> Loop:
    """The loop that a process runs.

    Args:
        frame: the prefetch pipeline for training, one micro-batch per batch.
        step: the dense stages of a replica.
        process: position of the process in its replica.
        read_ahead: batches read and not yet trained, at most: as the frame's.
    """
    own = step.lanes_of(process)
    embedding = step.embedding_stages[process]
    first = f"compute{embedding.position}"
    dense = {lane: lane_templates(step, lane) for lane in own}
    dense[first] += tuple(t for t in frame.lanes["compute"] if t.op not in _DENSE)
    reduces = {lane: lane_templates(step, lane) for lane in step.program.lanes if lane == f"reduce{process}"}
    lanes: dict[str, tuple[Template, ...]] = {}
    for lane, templates in frame.lanes.items():
        lanes |= {**dense, **reduces} if lane == "compute" else {lane: templates}
    performed = {(t.stage, op) for ts in lanes.values() for t in ts for op in (t.op, *OPS[t.op].provides)}
    edges = [e for e in step.program.edges if e.src_key in performed and e.dst_key in performed]
    # A batch is over when every lane is through with it: then its tensors may go.
    ends = [_SINK, *(templates[-1].key for lane, templates in dense.items() if lane != first)]
    capacities = [Edge(src=op, src_stage=stage, dst="X_READ", delay=read_ahead, kind="capacity") for stage, op in ends]
    return Loop(
        lanes=lanes,
        edges=(*_opened(frame, embedding), *edges, *capacities),
        source=frame.source,
        sink=_SINK,
        stages=step.program.stages,
        resources=_resources(frame, tuple(dense), tuple(reduces)),
        semantics=frame.semantics,
    )


def lane_templates(step: StepProgram, lane: str) -> tuple[Template, ...]:
    """What a lane does for every batch; an overlap's parts one after the other, receives some computations ahead.

    A receive only says where to; a sender that finds it posted sends at once, and has not to ask first.
    """
    found: list[Template] = []
    computed: list[int] = []  # places of the latest computations
    for atom in (atom for action in step.program.lanes[lane] for atom in action.atoms):
        template = Template(op=atom.op, stage=atom.stage, unit=atom.index or 0, peer=atom.peer)
        if OPS[atom.op].role == "recv" and computed:
            found.insert(computed[0], template)
            computed = [place + 1 for place in computed]
            continue
        if OPS[atom.op].role in _COMPUTATIONS:
            computed = [*computed, len(found)][-_RECEIVES_AHEAD:]
        found.append(template)
    return tuple(found)


def _opened(frame: Loop, embedding: EmbeddingStage) -> list[Edge]:
    """The frame's edges, from and to the embedding stage instead of the one dense stage."""
    found: list[Edge] = []
    for edge in frame.edges:
        if edge.dst == "F":
            found.append(replace(edge, dst="X_EMBED", dst_stage=embedding.number))
        elif edge.src == "B" and edge.dst not in _DENSE:
            found.append(replace(edge, src="X_EMBED_GRAD", src_stage=embedding.number))
        elif edge.src not in _DENSE and edge.dst not in _DENSE and not _bounds_reading(edge, frame):
            found.append(edge)
    return found


def _bounds_reading(edge: Edge, frame: Loop) -> bool:
    return edge.kind == "capacity" and edge.dst_key == frame.source


def _resources(frame: Loop, dense: tuple[str, ...], reduces: tuple[str, ...]) -> tuple[Resource, ...]:
    kept = tuple(resource for resource in frame.resources if resource.name != "compute")
    return (
        *kept,
        *(Resource(name=lane, kind="gpu") for lane in dense),
        *(Resource(name=lane, kind="copy") for lane in reduces),
    )
