from __future__ import annotations

import dataclasses

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.cover import COVER_RULES, Cover, check_cover
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph
from tests.schedule.dense import dense
from tests.schedule.tables import lanes

#: A fork 0 -> 1, 2 and a join 3; the join runs with one branch.
GOOD = Cover(
    graph=StageGraph(micro_per_batch=(2, 2, 2), edges=((0, 1), (0, 2), (1, 2))),
    operators=(frozenset({0}), frozenset({1}), frozenset({2, 3})),
    num_operators=4,
    operator_edges=((0, 1), (1, 3), (0, 2), (2, 3)),
    losses=frozenset({2}),
    tensors={(0, 1): frozenset({"x"}), (1, 2): frozenset({"y"})},
    outputs=(frozenset({"x"}), frozenset({"y", "z"}), frozenset()),
    devices=(frozenset({0}), frozenset({1, 2}), frozenset({3})),
)

TWO = StageGraph(micro_per_batch=(2, 2), edges=((0, 1),))

BROKEN = {
    "partition: operator 1 is in no stage; expected exactly one": dataclasses.replace(
        GOOD, operators=(frozenset({0}), frozenset(), frozenset({2, 3}))
    ),
    r"partition: operator 1 is in stages \[0, 1\]": dataclasses.replace(
        GOOD, operators=(frozenset({0, 1}), frozenset({1}), frozenset({2, 3}))
    ),
    "partition: stage 2 has operator 4; the model has 0 to 3": dataclasses.replace(
        GOOD, operators=(frozenset({0}), frozenset({1}), frozenset({2, 3, 4}))
    ),
    "partition: expected the operators of 2 stages, got 3": dataclasses.replace(GOOD, graph=TWO),
    "convex: stage 0: a path leaves it through operator 1 and comes back to 3": Cover(
        graph=TWO,
        operators=(frozenset({0, 3}), frozenset({1, 2})),
        num_operators=4,
        operator_edges=((0, 1), (1, 2), (2, 3)),
    ),
    "edges: operator 0 feeds 2, but there is no edge 0-2 between their stages": dataclasses.replace(
        GOOD, graph=StageGraph(micro_per_batch=(2, 2, 2), edges=((0, 1), (1, 2)))
    ),
    "edges: edge 0-2: no operator of stage 0 feeds one of stage 2": dataclasses.replace(
        GOOD, operator_edges=((0, 1), (1, 3), (2, 3))
    ),
    "produced: edge 1-2 carries x, which stage 1 does not produce; it has y, z": dataclasses.replace(
        GOOD, tensors={(1, 2): frozenset({"x", "y"})}
    ),
    "produced: stage 1 takes x of stage 2; there is no such edge": dataclasses.replace(
        GOOD, tensors={(2, 1): frozenset({"x"})}
    ),
    "losses: stage 2 has no path to a loss; loss stages are 1": dataclasses.replace(GOOD, losses=frozenset({1})),
    "losses: loss stage 7 is not among 0 to 2": dataclasses.replace(GOOD, losses=frozenset({7})),
    "devices: device 1 belongs to stages 1 and 2": dataclasses.replace(
        GOOD, devices=(frozenset({0}), frozenset({1, 2}), frozenset({1}))
    ),
}


def test_a_good_cover() -> None:
    check_cover(GOOD)
    check_cover(Cover(graph=GOOD.graph))


@pytest.mark.parametrize(("complaint", "cover"), BROKEN.items(), ids=BROKEN)
def test_each_rule_names_its_violation(complaint: str, cover: Cover) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_cover(cover)


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in COVER_RULES} == {complaint.partition(":")[0] for complaint in BROKEN}


def check_monotone(program: Program) -> None:
    """C4: forwards and backwards of a stage run in micro-batch order (not in breadth-first).

    Raises:
        ScheduleError: the first action out of order.
    """
    last: dict[tuple[int, int, str], int] = {}
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            role = OPS[atom.op].role
            if role not in ("forward", "backward", "input_grad") or atom.index is None:
                continue
            key = (atom.stage, atom.pipe, "F" if role == "forward" else "I")
            if atom.index <= last.get(key, -1):
                raise ScheduleError(f"monotone: lane {lane}: {atom.text} comes after micro-batch {last[key]}")
            last[key] = atom.index


def test_micro_batches_in_order() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "dualpipe-v", "chimera", "graph"):
        check_monotone(dense(name, 4, 8))
    with pytest.raises(ScheduleError, match="monotone: lane rank0: 4B6 comes after micro-batch 7"):
        check_monotone(dense("breadth-first", 4, 8))
    with pytest.raises(ScheduleError, match="monotone: lane a: 0I0 comes after micro-batch 1"):
        check_monotone(Program(lanes=lanes(a="0F0 0F1 0B1 0I0 0W0")))
