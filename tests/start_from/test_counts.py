"""Counters that a new job takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagpipe.checkpoint.dense_state import DenseState
from bagpipe.start_from.counts import JobPlan, match_job, optimizer_name
from bagpipe.start_from.source import Counts, SourceTable

SETTINGS = {
    "optim.schedule": "cosine",
    "optim.warmup_steps": 3,
    "run.seed": 1,
    "run.loss_scale": 8,
    "optim.dense": "adam",
}
SCALE = {"loss_scale": 16, "finite_steps": 2}


@dataclass
class Job:
    """A source without tensors."""

    label: str = "a"
    tables: Mapping[str, SourceTable] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    seed: int | None = 1
    counts: Counts = field(
        default_factory=lambda: Counts(rows=9, schedule=7, progress={**SCALE, "plateau": {"factor": 0.5}})
    )
    world_size: int = 2
    checkpoint_id: str = "x"

    def outline(self, names: frozenset[str]) -> DenseState:
        return DenseState(tensors={})

    def dense(self, rank: int, names: frozenset[str]) -> DenseState:
        return DenseState(tensors={})


def decided(settings: Mapping[str, Any], seed: int = 1, world_size: int = 2, *without: str) -> dict[str, str]:
    _, items = match_job(Job(), {**SETTINGS, **settings}, seed, world_size, without)
    return {item.name: item.fate.value for item in items}


def test_counts_go_on_unless_their_settings_differ() -> None:
    taken = {"schedule": "taken", "loss_scale": "taken", "random": "taken", "unseen rows": "taken"}
    assert match_job(Job(), SETTINGS, 1, 2, ())[0] == JobPlan(
        schedule_step=7, takes_random=True, progress={**SCALE, "plateau": {"factor": 0.5}}
    )
    assert decided({"optim.dense_lr": 0.5}) == taken
    assert decided({"optim.warmup_steps": 4}) == {**taken, "schedule": "new"}
    assert decided({}, 1, 2, "job.schedule") == {**taken, "schedule": "new"}
    assert match_job(Job(), {**SETTINGS, "optim.schedule": "step"}, 1, 2, ())[0].progress == SCALE
    assert decided({"run.loss_scale": 4}) == {**taken, "loss_scale": "new"}
    assert decided({}, 1, 3) == {**taken, "random": "new"}
    assert decided({"run.seed": 2}, 2) == {**taken, "random": "new", "unseen rows": "new"}
    assert match_job(Job(checkpoint_id=""), SETTINGS, 1, 2, ()) == (JobPlan(), [])


def test_the_optimizer_of_both_programs() -> None:
    assert [optimizer_name(settings) for settings in (SETTINGS, {"optimizer": "AdamW"}, {})] == ["adam", "adamw", ""]
