from __future__ import annotations

from functools import partial

from bagpipe.pipeline.compile import CompiledLoop, Requirement, Step, compile_loop
from bagpipe.pipeline.runner import EndOfBatches, Runner
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Stage


def compiled(loop: Loop) -> CompiledLoop:
    ops = {template.op for _, template in loop.templates}
    hazards = {edge.hazard: lambda batch: -1 for edge in loop.edges if edge.kind == "hazard"}
    return compile_loop(loop, dict.fromkeys(ops, lambda index: None), hazards)


def needs(loop: Loop) -> dict[str, list[str]]:
    """Step -> its requirements, as ``op(b-delay)#position``."""
    result = compiled(loop)

    def spell(step: Step) -> list[str]:
        fixed = [f"{result.op_names[r.op]}(b-{r.delay})#{r.position}" for r in step.requirements]
        return fixed + [f"{result.op_names[h.op]}({h.name})#{h.position}" for h in step.hazards]

    return {f"{step.text}.{step.unit}": spell(step) for lane in result.lanes for step in lane.steps}


def test_the_training_pipeline_compiles_to_few_comparisons() -> None:
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=2, microbatches=2)
    assert needs(loop) == {
        "0X_READ.0": ["0OPT(b-8)#1"],
        "0X_FETCH.0": ["0X_READ(b-0)#1", "0X_INSERT(b-4)#1", "0X_WRITEBACK(fetch_after)#1"],
        "0X_EVICT.0": ["0X_READ(b-0)#1", "0X_WRITEBACK(b-2)#1", "0X_UPDATE(evict_after)#1"],
        "0X_INSERT.0": ["0X_FETCH(b-0)#1"],  # its eviction comes before it in its own lane
        "0F.0": ["0X_INSERT(b-0)#1"],
        "0B.0": [],
        "0F.1": [],  # the first micro-batch has waited for the insertion
        "0B.1": [],
        "0X_UPDATE.0": [],
        "0OPT.0": [],
        "0X_WRITEBACK.0": ["0X_EVICT(b-0)#1"],
    }


def test_a_batch_op_waits_for_every_micro_batch() -> None:
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=2, microbatches=3, train=False)
    compiled_needs = needs(loop)
    assert compiled_needs["0X_READ.0"] == ["0F(b-8)#3"]
    assert compiled_needs["0X_INSERT.0"] == ["0X_FETCH(b-0)#1", "0F(evict_after)#3"]


def test_positions_follow_lane_order_not_micro_batch_numbers() -> None:
    """Stage 1 runs its micro-batches backwards: it finishes micro-batch 1 first."""
    loop = Loop(
        lanes={
            "data": (Template(op="X_READ"),),
            "a": (Template(op="F", unit=1), Template(op="F", unit=0)),
            "b": (Template(op="F", stage=1, unit=0), Template(op="F", stage=1, unit=1)),
        },
        edges=(Edge(src="X_READ", dst="F"), Edge(src="F", dst="F", dst_stage=1)),
        stages=(Stage(number=0, micro_per_batch=2), Stage(number=1, micro_per_batch=2)),
        source=(0, "X_READ"),
        sink=(1, "F"),
    )
    assert needs(loop)["1F.0"] == ["0F(b-0)#2"]
    assert needs(loop)["1F.1"] == []


def test_an_earlier_step_covers_only_its_own_batch() -> None:
    """X_INSERT of batch b + 1 has waited for X_FETCH of b + 1, which implies b, but not the other way round."""
    lanes = {
        "data": (Template(op="X_READ"),),
        "net": (Template(op="X_FETCH"),),
        "all": (Template(op="X_INSERT", offset=0), Template(op="X_PULL", offset=1)),
    }
    edges = (
        Edge(src="X_READ", dst="X_FETCH"),
        Edge(src="X_FETCH", dst="X_INSERT"),
        Edge(src="X_FETCH", dst="X_PULL"),
    )
    assert needs(Loop(lanes=lanes, edges=edges, source=(0, "X_READ"), sink=(0, "X_INSERT")))["0X_PULL.0"] == [
        "0X_FETCH(b-0)#1"
    ]


def test_covering() -> None:
    assert Requirement(0, 1, 3, 3).covers(Requirement(0, 1, 3, 2))
    assert Requirement(0, 1, 3, 1).covers(Requirement(0, 2, 3, 3))
    assert not Requirement(0, 2, 3, 3).covers(Requirement(0, 1, 3, 1))
    assert not Requirement(0, 1, 3, 3).covers(Requirement(1, 1, 3, 1))


def test_a_batch_whose_units_are_in_two_turns_is_counted_in_its_own_order() -> None:
    """Lane a does units 1, 0+ in a turn; unit 0 of a batch is its first action, so a waiter for it needs one."""
    templates = (Template(op="F", unit=1), Template(op="F", offset=1), Template(op="OPT"))
    loop = Loop(
        lanes={
            "data": (Template(op="X_READ"),),
            "a": templates,
            "b": (Template(op="F", stage=1), Template(op="F", stage=1, unit=1)),
        },
        edges=(
            Edge(src="X_READ", dst="F"),
            Edge(src="F", dst="F", dst_stage=1),
            Edge(src="OPT", dst="X_READ", delay=3, kind="capacity"),
        ),
        source=(0, "X_READ"),
        sink=(0, "OPT"),
        stages=tuple(Stage(number=number, micro_per_batch=2) for number in (0, 1)),
    )
    assert needs(loop)["1F.0"] == ["0F(b-0)#1"]
    assert needs(loop)["1F.1"] == ["0F(b-0)#2"]
    done: list[tuple[str, int]] = []

    def act(text: str, index: int) -> None:
        if text == "X_READ" and index == 4:
            raise EndOfBatches
        done.append((text, index))

    Runner(loop, {text: partial(act, text) for text in ("0F", "1F", "OPT", "X_READ")}).run()
    assert [index for text, index in done if text == "0F"] == list(range(8))
    for index in range(8):
        assert done.index(("0F", index)) < done.index(("1F", index))
