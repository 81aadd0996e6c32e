"""`with_plan`: the pipeline and dense sections with the values of the plan file that `pipeline.plan` names.

pipeline.plan FILE ──PlanFile─┬─> pipeline: schedule, stages, microbatches, partition, replicas, stage_microbatches,
                              │             recompute, recompute_share
                              └─> dense:    shard, budget_bytes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bagpipe.config.dense_section import DenseConfig
from bagpipe.config.ranges import NumberText
from bagpipe.config.sections import PipelineConfig
from bagpipe.errors import InputError
from bagpipe.partition.plan_file import PlanFile
from bagpipe.util.documents import file_text

__all__ = ["planned_step_s", "with_plan"]

#: Keys whose values come from the plan.
_PLANNED = ("schedule", "stages", "microbatches", "chunks", "partition", "replicas", "stage_microbatches")
#: Those that another key can give if the plan leaves them at their defaults.
_RECOMPUTED = ("recompute", "recompute_share")


def with_plan(pipeline: PipelineConfig, dense: DenseConfig) -> tuple[PipelineConfig, DenseConfig]:
    """The sections with the plan's values; unchanged without a plan.

    Raises:
        InputError: the file cannot be read or is no plan, or another key says what the plan says.
    """
    if not pipeline.plan:
        return pipeline, dense
    _check_unset("pipeline", pipeline, PipelineConfig(), _PLANNED)
    plan = _read(pipeline.plan)
    counts = plan.microbatches
    named = [(name, number) for number, stage in enumerate(plan.stages) for name in stage.operators]
    shares = [stage.recompute for stage in plan.stages]
    if any(shares):
        _check_unset("pipeline", pipeline, PipelineConfig(), _RECOMPUTED)
        pipeline = dataclasses.replace(
            pipeline, recompute=True, recompute_share=NumberText(",".join(map(_share, shares)))
        )
    for key in ("shard", "budget_bytes"):
        value = getattr(plan, key)
        if value != getattr(DenseConfig(), key):
            _check_unset("dense", dense, DenseConfig(), (key,))
            dense = dataclasses.replace(dense, **{key: value})
    planned = dataclasses.replace(
        pipeline,
        schedule=plan.schedule,
        stages=len(plan.stages),
        microbatches=max(counts),
        stage_microbatches=",".join(map(str, counts)) if len(set(counts)) > 1 else "",
        partition=",".join(f"{name}={number}" for name, number in named),
        replicas=",".join(map(str, plan.replicas)) if max(plan.replicas) > 1 else "",
    )
    return planned, dense


def planned_step_s(pipeline: PipelineConfig) -> float | None:
    """Seconds of a step that the plan file predicts; None without a plan, or if it says none or is gone."""
    try:
        return (_read(pipeline.plan).step_s or None) if pipeline.plan else None
    except InputError:
        return None


def _read(path: str) -> PlanFile:
    return PlanFile.from_toml(file_text(path, subject="pipeline.plan"), source=f"pipeline.plan {path}")


def _check_unset(section: str, config: object, defaults: object, keys: Iterable[str]) -> None:
    for key in keys:
        if getattr(config, key) != getattr(defaults, key):
            raise InputError(
                f"{section}.{key} {getattr(config, key)} is not possible with pipeline.plan, which says it"
            )


def _share(share: float) -> str:
    """All digits: a share that is rounded down recomputes a micro-batch less."""
    return format(share, ".17f").rstrip("0").rstrip(".")
