from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.pipeline_rules import configured_schedule
from bagpipe.config.ranges import NumberText
from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config, PipelineConfig
from bagpipe.errors import InputError
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import DENSE_SCHEDULES

STAGES: dict[str, Any] = {"stages": 4, "microbatches": 8}

COSTS = {"F": 1, "2F": 2, "I": 1.5, "W": 1}


def test_measured_costs_and_memory_reach_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({key: [cost] for key, cost in COSTS.items()}), encoding="utf-8")
    expected = DENSE_SCHEDULES["zb-auto"].configured({"costs": COSTS, "memory": "3"}).build(chain(4, 8))
    for costs in (str(path), ",".join(f"{key}={cost}" for key, cost in COSTS.items())):
        pipeline = PipelineConfig(schedule="zb-auto", costs=costs, memory="3", **STAGES)
        check_config(Config(pipeline=pipeline))
        assert configured_schedule(pipeline).build(chain(4, 8)).lanes == expected.lanes


def test_the_recomputed_share_reaches_the_schedule() -> None:
    pipeline = PipelineConfig(schedule="1f1b-shifted", recompute_share=NumberText("0.5"), **STAGES)
    program = configured_schedule(pipeline).build(chain(4, 8))
    recomputed = [sum(action.op == "REC" for action in row) for row in program.lanes.values()]
    assert recomputed == [4, 2, 2, 0], "the last but one as the rank before it"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"schedule": "zb-auto"},
            "pipeline.schedule zb-auto needs pipeline.costs, measured durations of its stages, got none",
        ),
        (
            {"schedule": "zb-auto", "costs": "F=1,I=1"},
            "pipeline.schedule zb-auto does not allow these pipeline.stages, microbatches and chunks: zb-auto: no "
            "duration of W for stage 0: expected 0W or W",
        ),
        (
            {"schedule": "zb-auto", "costs": "F=1,I=1,W=x"},
            "pipeline.schedule zb-auto: pipeline.costs: W: expected a number, got 'x'",
        ),
        (
            {"schedule": "zb-auto", "costs": "none.json"},
            "pipeline.schedule zb-auto: pipeline.costs: cannot read none.json: No such file or directory",
        ),
        ({"schedule": "1f1b", "costs": "F=1"}, "pipeline.costs F=1 needs pipeline.schedule zb-auto, got 1f1b"),
        ({"schedule": "1f1b", "memory": "4"}, "pipeline.memory 4 needs pipeline.schedule zb-auto, got 1f1b"),
        (
            {"stages": 1, "microbatches": 1, "backward_shares": "0.5,1"},
            "pipeline.backward_shares 0.5,1 needs a pipeline.schedule and at least 2 pipeline.stages, got none and 1",
        ),
        (
            {"schedule": "1f1b", "stages": 1, "backward_shares": "0.5,1"},
            "pipeline.backward_shares 0.5,1 needs a pipeline.schedule and at least 2 pipeline.stages, got 1f1b and 1",
        ),
        (
            {"schedule": "1f1b", "backward_shares": "0,0.75"},
            "pipeline.backward_shares 0,0.75 never reach the first of 4 stages, which would not be trained: one of "
            "them must be above 0.75",
        ),
        (
            {"schedule": "1f1b", "backward_shares": "1.5,1"},
            "pipeline.backward_shares must be shares from 0 to 1 such as 0.5,1, got '1.5,1'",
        ),
        (
            {"schedule": "graph", "backward_shares": "0.5,1", "stage_microbatches": "8,8,8,4"},
            "pipeline.backward_shares 0.5,1 needs the same micro-batches in all stages, or pipeline.backward_unit rank",
        ),
        (
            {"schedule": "1f1b", "backward_unit": "rank"},
            "pipeline.backward_unit rank needs pipeline.backward_shares, got none",
        ),
        (
            {"stages": 1, "microbatches": 1, "processes": "1"},
            "pipeline.processes 1 needs pipeline.schedule, the name of a schedule, got none",
        ),
        (
            {"schedule": "1f1b", "processes": "1", "replicas": "2,1,1,1"},
            "pipeline.processes 1 is not possible with pipeline.replicas, which are ranks of each stage, got 2,1,1,1",
        ),
        (
            {"schedule": "1f1b", "recompute_share": "0.5"},
            "pipeline.recompute_share 0.5 needs pipeline.recompute true, or pipeline.schedule 1f1b-shifted, got 1f1b",
        ),
        (
            {"stages": 1, "microbatches": 1, "recompute": True, "recompute_share": "auto"},
            "pipeline.recompute_share auto needs a pipeline.schedule, or pipeline.microbatches above 1, got none and 1",
        ),
        (
            {"schedule": "1f1b", "recompute": True, "recompute_share": "0.5,0.25"},
            "pipeline.recompute_share 0.5,0.25 must be 1 number or 4, one per stage (pipeline.stages)",
        ),
        (
            {"schedule": "pipedream", "recompute": True, "recompute_share": "auto"},
            "pipeline.recompute_share auto needs a synchronous pipeline.schedule: others keep weights by batch, got "
            "pipedream",
        ),
        (
            {"schedule": "1f1b", "recompute": True, "activation_bytes": 100},
            "pipeline.activation_bytes 100 needs pipeline.recompute_share auto, got none",
        ),
        ({"schedule": "1f1b", "in_flight": 4}, "pipeline.in_flight 4 needs pipeline.schedule dynamic, got 1f1b"),
        ({"schedule": "gpipe", "record": "a"}, "pipeline.record a needs pipeline.schedule dynamic, got gpipe"),
        ({"schedule": "1f1b", "replay": "a"}, "pipeline.replay a needs pipeline.schedule dynamic, got 1f1b"),
        (
            {"schedule": "1f1b", "replicas": "2,1"},
            "pipeline.replicas 2,1 must be 4 numbers, one per stage (pipeline.stages)",
        ),
        (
            {"schedule": "chimera", "replicas": "2,1,1,1"},
            "pipeline.replicas 2,1,1,1 needs a pipeline.schedule of one direction and one stage per rank, such as 1f1b "
            "or graph, got chimera",
        ),
        (
            {"schedule": "1f1b", "stage_microbatches": "8,8,4,4"},
            "pipeline.stage_microbatches 8,8,4,4 needs pipeline.schedule graph, got 1f1b",
        ),
        (
            {"schedule": "graph", "stage_microbatches": "4,4,2,2"},
            "pipeline.stage_microbatches 4,4,2,2 needs pipeline.microbatches 4, the most of them, got 8",
        ),
    ],
)
def test_keys_that_do_not_fit_the_schedule_get_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config(Config(pipeline=PipelineConfig(**{**STAGES, **values})))
    assert str(caught.value) == line


def test_activations_go_to_the_host_between_actions_of_stages() -> None:
    with pytest.raises(InputError) as caught:
        check_config(Config(pipeline=PipelineConfig(activations="host")))
    assert str(caught.value) == (
        "pipeline.activations host needs a pipeline.schedule, or pipeline.microbatches above 1, got none and 1"
    )
    check_config(Config(pipeline=PipelineConfig(microbatches=2, activations="host")))


def test_a_plan_that_was_not_read_trains_nothing() -> None:
    with pytest.raises(InputError, match=r"pipeline.plan a was not read: a program reads it with its command line"):
        check_config(Config(pipeline=PipelineConfig(plan="a")))
