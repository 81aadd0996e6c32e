"""State of a job that a new job takes over: every entry of a checkpoint goes on, or is named, or is refused."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import bagpipe.train_pipeline
import bagpipe.training
from bagpipe.checkpoint.dense_state import PART, DenseState
from bagpipe.errors import InputError
from bagpipe.start_from.dense import DensePlan
from bagpipe.start_from.job_plan import JobPlan, part_tensors
from bagpipe.start_from.job_state import StateOfJob, match_job
from bagpipe.start_from.source import Counts, SourceTable
from bagpipe.start_from.tables import TablePlan
from bagpipe.training.part import LoopPart

SETTINGS = {
    "optim.schedule": "cosine",
    "optim.warmup_steps": 3,
    "run.seed": 1,
    "run.loss_scale": 8,
    "optim.dense": "adam",
}
STAGED = {**SETTINGS, "pipeline.schedule": "pipedream", "pipeline.stages": 2}
SCALE = {"loss_scale": 16, "finite_steps": 2}
WEIGHTS = {"w": torch.zeros(2)}


@dataclass
class Job:
    """A source without rows."""

    label: str = "a"
    tables: Mapping[str, SourceTable] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    seed: int | None = 1
    counts: Counts = field(
        default_factory=lambda: Counts(
            rows=9, schedule=7, dense=6, masks=5, progress={**SCALE, "plateau": {"factor": 0.5}}
        )
    )
    world_size: int = 2
    checkpoint_id: str = "x"
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def outline(self, names: frozenset[str]) -> DenseState:
        return DenseState(tensors={"model.w": torch.zeros(2), **self.state})

    def dense(self, rank: int, names: frozenset[str]) -> DenseState:
        return self.outline(names)


def matched(
    source: Job,
    settings: Mapping[str, Any] | None = None,
    *,
    seed: int = 1,
    world_size: int = 2,
    parts: Mapping[str, Mapping[str, Tensor]] | None = None,
    weights: tuple[str, ...] = ("w",),
    states: tuple[str, ...] = (),
    tables: tuple[TablePlan, ...] = (),
    without: tuple[str, ...] = (),
) -> tuple[JobPlan, dict[str, str]]:
    """The plan, and the fate of each kind."""
    ours = StateOfJob(
        settings=source.settings if settings is None else settings,
        seed=seed,
        world_size=world_size,
        parts={"plateau": {}} if parts is None else parts,
        trainable=WEIGHTS,
    )
    dense = DensePlan(weights=frozenset(weights), states=frozenset(states), averages=frozenset())
    plan, items = match_job(source, source.outline(frozenset()), ours, dense, tables, without)
    return plan, {item.name: item.fate.value for item in items}


def test_counts_go_on_unless_their_settings_differ() -> None:
    taken = dict.fromkeys(("schedule", "plateau", "loss_scale", "random", "unseen rows"), "taken")
    job = Job()
    assert matched(job) == (
        JobPlan(schedule_step=7, masks_step=5, takes_random=True, progress={**SCALE, "plateau": {"factor": 0.5}}),
        taken,
    )
    assert matched(job, {**SETTINGS, "optim.dense_lr": 0.5})[1] == taken
    anew = {**taken, "schedule": "new", "plateau": "new"}
    assert matched(job, {**SETTINGS, "optim.warmup_steps": 4})[1] == anew
    assert matched(job, without=("job.schedule",))[1] == anew
    assert matched(job, {**SETTINGS, "optim.schedule": "step"})[0].progress == SCALE
    assert matched(job, parts={})[1] == {**taken, "plateau": "dropped"}
    assert matched(job, {**SETTINGS, "run.loss_scale": 4})[1] == {**taken, "loss_scale": "new"}
    assert matched(job, world_size=3)[1] == {**taken, "random": "new"}
    assert matched(job, {**SETTINGS, "run.seed": 2}, seed=2)[1] == {**taken, "random": "new", "unseen rows": "new"}
    assert matched(job, without=("job.unseen*",))[1] == taken  # a rule, nothing that could be left out
    assert matched(Job(checkpoint_id="")) == (JobPlan(), {})


KFAC = {"part.kfac.l.next_turn": torch.tensor(6), "part.kfac.l.factor_a": torch.ones(2, 2)}
OURS = {"kfac": {"l.next_turn": torch.tensor(0)}}


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({}, "taken"),
        ({"parts": {}}, "dropped"),
        ({"weights": ()}, "new"),
        ({"settings": {**SETTINGS, "optim.kfac_lag": 1}}, "new"),
        ({"parts": {"kfac": {"other.next_turn": torch.tensor(0)}}}, "new"),
        ({"without": ("job.kfac",)}, "new"),
    ],
)
def test_factors_go_on_with_the_weights_they_are_of(changes: dict[str, Any], fate: str) -> None:
    job = Job(state=KFAC, settings={**SETTINGS, "optim.kfac_lag": 0})
    plan, fates = matched(job, **{"parts": OURS, **changes})
    assert fates["kfac"] == fate
    assert plan.dense_step == (6 if fate == "taken" else 0)
    assert dict(part_tensors(plan, job.outline(frozenset()))) == (KFAC if fate == "taken" else {})
    assert matched(Job(), parts=OURS)[1]["kfac"] == "new"


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({}, "taken"),
        ({"states": ()}, "new"),
        ({"weights": ()}, "new"),
        ({"settings": {**SETTINGS, "optimizer": "Other"}}, "new"),
        ({"without": ("job.optimizer",)}, "new"),
    ],
)
def test_what_an_optimizer_keeps_besides_goes_on_with_its_whole_state(changes: dict[str, Any], fate: str) -> None:
    kept = {"optim.w.step": torch.tensor(1.0), "part.optimizer.rest": torch.zeros(3, dtype=torch.uint8)}
    job = Job(state=kept, settings={**SETTINGS, "optimizer": "Warm"})
    plan, fates = matched(job, **{"states": ("w",), **changes})
    assert fates["optimizer"] == fate
    taken = {"part.optimizer.rest"} if fate == "taken" else set()
    assert {name for name, _ in part_tensors(plan, job.outline(frozenset()))} == taken


VERSIONS = {"part.dense.version0.w": torch.ones(2), "part.earlier_rows.0.X_UPDATE.1.ids": torch.tensor([3])}
PARTS = {"dense": {"version0.w": torch.zeros(2)}, "earlier_rows": {}}


@pytest.mark.parametrize(
    ("changes", "versions", "rows"),
    [
        ({}, "taken", "taken"),
        ({"settings": {**STAGED, "pipeline.stages": 3}}, "new", "new"),
        ({"settings": SETTINGS | {"pipeline.schedule": "gpipe"}, "parts": {"dense": {}}}, "dropped", "dropped"),
        ({"parts": {**PARTS, "dense": {"version0.w": torch.zeros(3)}}}, "new", "taken"),
        ({"tables": ()}, "taken", "new"),
    ],
)
def test_versions_and_earlier_rows_go_on_in_the_same_stages(changes: dict[str, Any], versions: str, rows: str) -> None:
    one, other = (cast(SourceTable, object()) for _ in range(2))
    job = Job(state=VERSIONS, settings=STAGED, tables={"one": one, "other": other})
    plans = tuple(TablePlan(number=n, source=table, takes_state=True) for n, table in ((1, one), (0, other)))
    plan, fates = matched(job, **{"parts": PARTS, "tables": plans, **changes})
    assert (fates["versions"], fates["earlier_rows"]) == (versions, rows)
    names = {name.split(".")[1]: name for name in dict(part_tensors(plan, job.outline(frozenset())))}
    # The table's number is that of the new job.
    expected = {"dense": "part.dense.version0.w", "earlier_rows": "part.earlier_rows.0.X_UPDATE.0.ids"}
    assert names == {part: name for part, name in expected.items() if part in plan.parts}
    assert plan.parts == {part for part, fate in (("dense", versions), ("earlier_rows", rows)) if fate == "taken"}


@pytest.mark.parametrize(
    ("ours", "changes", "fate"),
    [
        ({}, {}, "taken"),
        ({}, {"world_size": 1}, "new"),
        ({"pipeline.backward_shares": ""}, {}, "new"),
        ({"run.seed": 2}, {}, "new"),  # of the units' order
        ({"pipeline.recompute": "stages"}, {}, "taken"),
    ],
)
def test_the_rotation_of_partial_backwards_goes_on(ours: dict[str, Any], changes: dict[str, Any], fate: str) -> None:
    partial = {**STAGED, "pipeline.backward_shares": "0.5,1", "pipeline.recompute": "none"}
    plan, fates = matched(Job(settings=partial), {**partial, **ours}, **changes)
    assert fates["rotation"] == fate
    assert plan.dense_step == (6 if fate == "taken" else 0)


def test_what_counts_from_0_is_named() -> None:
    progress = {"samples": 9, "reader_state": {}, "evaluations": {}, "user_state": {}, "steps": 3, "dense": {}}
    plan, fates = matched(Job(counts=Counts(progress=progress)), parts={})
    assert plan.progress == {}
    assert {name for name, fate in fates.items() if fate == "new"} == {"totals", "data", "evaluations", "user_state"}


FOLLOWS = {"data.min_uses": 2, "data.expire_after_by_table": ["a=3"]}


@pytest.mark.parametrize(
    ("theirs", "ours", "fate"), [({}, FOLLOWS, "new"), (FOLLOWS, FOLLOWS, "new"), (FOLLOWS, {}, "dropped")]
)
def test_what_the_cacher_knows_of_rows_is_named(theirs: dict[str, Any], ours: dict[str, Any], fate: str) -> None:
    _, fates = matched(Job(settings={**SETTINGS, **theirs}), {**SETTINGS, **ours})
    assert fates["uses"] == fates["ages"] == fate


@pytest.mark.parametrize(
    "unknown",
    [
        {"counts": Counts(progress={"samples": 1, "tide": 3})},
        {"state": {"part.tide.w": torch.zeros(1)}},
        {"state": {"tide": torch.zeros(1)}},
    ],
)
def test_state_that_neither_goes_on_nor_is_named_is_refused(unknown: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"a has state '(part\.)?tide(\.w)?', which this version can neither take over"
    ):
        matched(Job(**unknown))


def test_every_part_that_keeps_tensors_is_known() -> None:
    """A part that is added with tensors, and without a kind here, fails."""
    for room in (bagpipe.training, bagpipe.train_pipeline):
        for module in pkgutil.iter_modules(room.__path__):
            importlib.import_module(f"{room.__name__}.{module.name}")
    found = set[str]()
    kinds = [LoopPart]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if any(
            "tensors" in vars(each) or "row_tensors" in vars(each) for each in kind.__mro__[:-2] if each is not LoopPart
        ):
            found.add(kind.name or "decay")  # named by the history it notes
    assert {"kfac", "dense", "average", "decay", "earlier_rows", "optimizer"} <= found
    for name in found:
        matched(Job(state={f"{PART}{name}.w": torch.zeros(1)}))


def test_counts_of_batches_are_those_that_a_job_goes_on_counting() -> None:
    from bagpipe.training.part import EarlierSteps

    assert {each.name for each in dataclasses.fields(EarlierSteps)} <= {
        each.name for each in dataclasses.fields(Counts)
    }
