"""`with_plan`: the pipeline section with the values of the plan file that it names.

pipeline.plan FILE ──PlanFile──> schedule, stages, microbatches, partition, replicas, stage_microbatches
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bagpipe.config.sections import PipelineConfig
from bagpipe.errors import InputError
from bagpipe.partition.plan_file import PlanFile

__all__ = ["with_plan"]

#: Keys whose values come from the plan.
_PLANNED = ("schedule", "stages", "microbatches", "chunks", "partition", "replicas", "stage_microbatches")


def with_plan(pipeline: PipelineConfig) -> PipelineConfig:
    """The section with the plan's values; unchanged without a plan.

    Raises:
        InputError: the file cannot be read or is no plan, another key says what the plan says, or values between
            stages are laid out in another way than by examples.
    """
    if not pipeline.plan:
        return pipeline
    defaults = PipelineConfig()
    for key in _PLANNED:
        if getattr(pipeline, key) != getattr(defaults, key):
            raise InputError(
                f"pipeline.{key} {getattr(pipeline, key)} is not possible with pipeline.plan, which says it"
            )
    source = f"pipeline.plan {pipeline.plan}"
    try:
        text = Path(pipeline.plan).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{source}: {error}") from None
    plan = PlanFile.from_toml(text, source=source)
    for number, stage in enumerate(plan.stages):
        if stage.layout != "batch":
            raise InputError(
                f"{source}: stage {number}: layout: training divides examples among ranks: expected 'batch', "
                f"got {stage.layout!r}"
            )
    counts = plan.microbatches
    named = [(name, number) for number, stage in enumerate(plan.stages) for name in stage.operators]
    return dataclasses.replace(
        pipeline,
        schedule=plan.schedule,
        stages=len(plan.stages),
        microbatches=max(counts),
        stage_microbatches=",".join(map(str, counts)) if len(set(counts)) > 1 else "",
        partition=",".join(f"{name}={number}" for name, number in named),
        replicas=",".join(map(str, plan.replicas)) if max(plan.replicas) > 1 else "",
    )
