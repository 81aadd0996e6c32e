"""Counters that a new job takes over: positions of schedules, loss scale, random state, seed of unseen rows. Pure.

settings of both jobs ──match_job──> JobPlan, Takings
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagpipe.start_from.source import Source
from bagpipe.start_from.takings import Fate, Taking, matches

__all__ = ["JobPlan", "match_job", "optimizer_name"]

#: Beginnings of the keys that make a schedule.
_SCHEDULES = ("optim.schedule", "optim.warmup", "optim.rows_schedule", "optim.rows_warmup")
#: Its counters in `Part.progress`.
_SCALE_COUNTS = ("loss_scale", "finite_steps")
#: Keys that make a loss scale.
_SCALES = ("run.autocast", "run.loss_scale", "run.loss_scale_growth_interval")
#: Keys of the seed of random numbers, in the training program and in `TrainPipeline`.
_SEEDS = ("run.seed", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The counters that the new job takes over.

    Attributes:
        schedule_step: position of the schedules of learning rates at batch 0.
        takes_random: the ranks go on with the random states of the source's.
        progress: counters of each rank.
    """

    schedule_step: int = 0
    takes_random: bool = False
    progress: Mapping[str, Any] = field(default_factory=dict)


def optimizer_name(settings: Mapping[str, Any]) -> str:
    """Name of a job's dense optimizer, in lower case; empty: not known."""
    return str(settings.get("optim.dense") or settings.get("optimizer") or "").lower()


def match_job(
    source: Source, settings: Mapping[str, Any], seed: int, world_size: int, without: Sequence[str]
) -> tuple[JobPlan, list[Taking]]:
    """Compare the settings of both jobs.

    Args:
        source: what is taken from.
        settings: of the new job.
        seed: of its initial rows.
        world_size: its number of ranks.
        without: see `checkpoint.start_without`.
    """
    if not source.checkpoint_id:
        return JobPlan(), []
    items: list[Taking] = []

    def decide(name: str, detail: str, problem: str) -> bool:
        if not problem and matches(f"job.{name}", without):
            problem = "left out (checkpoint.start_without)"
        fate = Fate.NEW if problem else Fate.TAKEN
        items.append(Taking(kind="job", name=name, fate=fate, detail=problem or detail))
        return not problem

    theirs, position = source.settings, source.counts.schedule
    keys = sorted(key for key in {*theirs, *settings} if key.startswith(_SCHEDULES))
    schedule = decide("schedule", f"learning rates go on at step {position}", _difference(theirs, settings, keys))
    counted = source.counts.progress
    progress = {"plateau": counted["plateau"]} if schedule and "plateau" in counted else {}
    if "loss_scale" in counted:
        detail = f"goes on at {counted['loss_scale']}"
        if decide("loss_scale", detail, _difference(theirs, settings, _SCALES)):
            progress |= {key: counted[key] for key in _SCALE_COUNTS if key in counted}
    problem = _difference(theirs, settings, _SEEDS)
    if not problem and source.world_size != world_size:
        problem = f"{world_size} ranks, were {source.world_size}"
    random = decide("random", "states of the random number generators", problem)
    if source.seed is not None:
        problem = "" if source.seed == seed else f"seed {seed}, was {source.seed}"
        detail = f"rows that are not there begin as they would in that job: seed {seed}"
        items.append(
            Taking(kind="job", name="unseen rows", fate=Fate.NEW if problem else Fate.TAKEN, detail=problem or detail)
        )
    plan = JobPlan(schedule_step=position if schedule else 0, takes_random=random, progress=progress)
    return plan, items


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first key with two values, as text; empty if there is none."""
    for key in keys:
        if key in theirs and key in ours and theirs[key] != ours[key]:
            return f"{key} {ours[key]}, was {theirs[key]}"
    return ""
