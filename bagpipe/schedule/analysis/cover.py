"""R5: stages cover a model: they partition its operators, and the stage graph follows from the operators' edges.

operators 0 1 2 3, edges 0-1 1-3 0-2 2-3, stages {0} {1} {2, 3}   ->   stage edges 0-1 0-2 1-2

partition   every operator is in exactly one stage
convex      no path between two operators of a stage leaves it
edges       stages are connected exactly if operators of theirs are
produced    a stage produces the tensors on its outgoing edges
losses      every stage has a path to a loss
devices     no two stages share a device
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.rules import Rule
from bagpipe.schedule.ir.stage_graph import StageGraph

__all__ = ["COVER_RULES", "Cover", "check_cover"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """Stages and their operators. Empty attributes are not checked.

    Attributes:
        graph: the stages.
        operators: per stage, the numbers of its operators.
        num_operators: operators are numbered from 0.
        operator_edges: (producer, consumer) operators.
        losses: stages that end in a loss.
        tensors: (producer, consumer) stages -> names of the tensors between them.
        outputs: per stage, names of the tensors it produces.
        devices: per stage, its devices.
    """

    graph: StageGraph
    operators: Sequence[frozenset[int]] = ()
    num_operators: int = 0
    operator_edges: Sequence[tuple[int, int]] = ()
    losses: frozenset[int] = frozenset()
    tensors: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    outputs: Sequence[frozenset[str]] = ()
    devices: Sequence[frozenset[int]] = ()


def _partition(cover: Cover) -> Iterator[str]:
    """C1: the stages' operators are a partition of the model's."""
    if not cover.operators:
        return
    if len(cover.operators) != cover.graph.num_stages:
        yield f"expected the operators of {cover.graph.num_stages} stages, got {len(cover.operators)}"
    holders: dict[int, list[int]] = {operator: [] for operator in range(cover.num_operators)}
    for stage, operators in enumerate(cover.operators):
        for operator in sorted(operators):
            holders.setdefault(operator, []).append(stage)
    for operator, stages in sorted(holders.items()):
        if operator >= cover.num_operators:
            yield f"stage {stages[0]} has operator {operator}; the model has 0 to {cover.num_operators - 1}"
        elif len(stages) != 1:
            yield f"operator {operator} is in {f'stages {stages}' if stages else 'no stage'}; expected exactly one"


def _convex(cover: Cover) -> Iterator[str]:
    """C1: a path that leaves a stage does not return to it."""
    consumers: dict[int, list[int]] = {}
    for src, dst in cover.operator_edges:
        consumers.setdefault(src, []).append(dst)
    for stage, operators in enumerate(cover.operators):
        left = [dst for src in sorted(operators) for dst in consumers.get(src, ()) if dst not in operators]
        seen = set(left)
        for operator in left:  # grows during the iteration
            for dst in consumers.get(operator, ()):
                if dst in operators:
                    yield f"stage {stage}: a path leaves it through operator {left[0]} and comes back to {dst}"
                    return
                if dst not in seen:
                    seen.add(dst)
                    left.append(dst)


def _edges(cover: Cover) -> Iterator[str]:
    """C2: stage edges are the edges of the operators."""
    if not cover.operators:
        return
    stage_of = {operator: stage for stage, operators in enumerate(cover.operators) for operator in operators}
    needed: dict[tuple[int, int], tuple[int, int]] = {}
    for src, dst in cover.operator_edges:
        if src in stage_of and dst in stage_of and stage_of[src] != stage_of[dst]:
            needed.setdefault((stage_of[src], stage_of[dst]), (src, dst))
    for (producer, consumer), (src, dst) in needed.items():
        if (producer, consumer) not in cover.graph.edges:
            yield f"operator {src} feeds {dst}, but there is no edge {producer}-{consumer} between their stages"
    for producer, consumer in cover.graph.edges:
        if (producer, consumer) not in needed:
            yield f"edge {producer}-{consumer}: no operator of stage {producer} feeds one of stage {consumer}"


def _produced(cover: Cover) -> Iterator[str]:
    """Tensors of an edge that its producing stage does not make."""
    for (producer, consumer), names in cover.tensors.items():
        if (producer, consumer) not in cover.graph.edges:
            yield f"stage {consumer} takes {', '.join(sorted(names))} of stage {producer}; there is no such edge"
        made = cover.outputs[producer] if producer < len(cover.outputs) else frozenset()
        for name in sorted(names - made):
            there = ", ".join(sorted(made)) or "nothing"
            yield f"edge {producer}-{consumer} carries {name}, which stage {producer} does not produce; it has {there}"


def _losses(cover: Cover) -> Iterator[str]:
    """Every stage matters: some path leads from it to a loss."""
    if not cover.losses:
        return
    reached = sorted(cover.losses)
    for stage in reached:  # grows during the iteration
        if stage >= cover.graph.num_stages:
            yield f"loss stage {stage} is not among 0 to {cover.graph.num_stages - 1}"
            return
        reached += [producer for producer in cover.graph.producers[stage] if producer not in reached]
    for stage in sorted(set(range(cover.graph.num_stages)) - set(reached)):
        yield f"stage {stage} has no path to a loss; loss stages are {', '.join(map(str, sorted(cover.losses)))}"


def _devices(cover: Cover) -> Iterator[str]:
    """C3: stages share no device."""
    owner: dict[int, int] = {}
    for stage, devices in enumerate(cover.devices):
        for device in sorted(devices):
            if owner.setdefault(device, stage) != stage:
                yield f"device {device} belongs to stages {owner[device]} and {stage}"


COVER_RULES: tuple[Rule[Cover], ...] = (
    Rule("partition", "every operator is in exactly one stage", _partition),
    Rule("convex", "no path leaves a stage and comes back", _convex),
    Rule("edges", "stage edges are the edges of the operators", _edges),
    Rule("produced", "a stage produces the tensors on its outgoing edges", _produced),
    Rule("losses", "every stage has a path to a loss", _losses),
    Rule("devices", "stages share no device", _devices),
)


def check_cover(cover: Cover) -> None:
    """Check every rule of COVER_RULES.

    Raises:
        ScheduleError: the first complaint.
    """
    for rule in COVER_RULES:
        for complaint in rule.complaints(cover):
            raise ScheduleError(f"{rule.name}: {complaint}")
