"""Staged dense part on one or more ranks: every schedule gives the numbers of the whole model.

By default every schedule runs with one model on one number of ranks, one schedule of each kind on each number of ranks,
and every model with a schedule of each kind. The full product is ``-m slow``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bagpipe.config.sections import Config
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.effort import some_of
from tests.system.jobs import JobOutcome, change, run_job
from tests.system.staging import MODELS, assert_equal_numbers, full, of_job, run_staged, staged
from tests.system.test_exactness import MakeConfig

WORLDS = (1, 2, 4)

#: Five batches of twelve, and one with fewer examples than micro-batches.
_EXAMPLES = 65

Case = tuple[str, str, str, int]

#: Model, schema, schedule, ranks.
ALL: list[Case] = [(*model, schedule, world) for model in MODELS for schedule in DENSE_SCHEDULES for world in WORLDS]


#: A chain with one pipe, any graph, two pipes, split backward.
_KINDS = (
    ("1f1b", "gpipe", "eager-1f1b", "interleaved", "breadth-first", "1f1b-shifted"),
    ("graph",),
    ("chimera", "chimera-doubling", "chimera-halving", "dualpipe-v"),
    ("zb-v", "zb-h1", "zb-h2", "zb-auto", "v-half", "v-min", "interleaved-zero-bubble"),
)


def some() -> list[Case]:
    """See the module's docstring."""
    runs = [(schedule, WORLDS[number % len(WORLDS)]) for number, schedule in enumerate(DENSE_SCHEDULES)]
    runs += [run for run in itertools.product([kind[0] for kind in _KINDS], WORLDS) if run not in runs]
    cases: list[Case] = [(*MODELS[number % len(MODELS)], *run) for number, run in enumerate(runs)]
    for kind in _KINDS:
        met = {model for model, _, schedule, _ in cases if schedule in kind}
        missing = [model for model in MODELS if model[0] not in met]
        cases += [(*model, kind[0], WORLDS[number % len(WORLDS)]) for number, model in enumerate(missing)]
    return cases


class References:
    """Float64 results of the whole model, each run once."""

    def __init__(self, clicks: MakeConfig) -> None:
        self._clicks = clicks
        self._ends: dict[tuple[str, str], JobOutcome] = {}

    def of(self, model: str, schema: str) -> tuple[Config, JobOutcome]:
        config = change(self._clicks(schema, model, "adagrad", limit=_EXAMPLES), run__dtype="float64")
        if (model, schema) not in self._ends:
            self._ends[model, schema] = run_job(config)
        return config, self._ends[model, schema]


@pytest.fixture(scope="module")
def references(clicks: MakeConfig) -> References:
    return References(clicks)


def check(references: References, case: Case) -> None:
    model, schema, schedule, world_size = case
    config, whole = references.of(model, schema)
    config = staged(config, schedule, full(schedule, world_size))
    if world_size > 1:
        assert_equal_numbers(run_staged(config, world_size), of_job(whole))
        return
    end = run_job(config)
    assert_equal_numbers(of_job(end), of_job(whole))
    np.testing.assert_allclose(end.losses, whole.losses, rtol=0, atol=1e-12)
    assert end.auc == pytest.approx(whole.auc, abs=1e-12)


#: Every schedule once, and one in three of the other cases.
TELLING = [number for number in range(len(some())) if number < len(DENSE_SCHEDULES) or number % 3 == 0]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if number in TELLING else pytest.mark.slow) for number, case in enumerate(some())],
    ids=lambda case: "-".join(map(str, case)),
)
def test_numbers_of_the_whole_model(case: Case, references: References) -> None:
    check(references, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_schedule_with_every_model(references: References) -> None:
    for case in ALL:
        check(references, case)


@pytest.mark.parametrize(
    ("rows", "world_size"), some_of([*itertools.product(["adam", "sgd", "rowwise_adagrad"], WORLDS)], {1, 5, 6})
)
def test_every_optimizer(clicks: MakeConfig, rows: str, world_size: int) -> None:
    """Four ranks, two replicas of the pipeline."""
    dense = {"adam": "sgd", "sgd": "adam", "rowwise_adagrad": "adam"}[rows]
    config = change(clicks("mixed", "deepfm", rows, limit=60), run__dtype="float64", optim__dense=dense)
    assert_equal_numbers(run_staged(staged(config, "1f1b", 2), world_size), run_staged(config))


@pytest.mark.parametrize("world_size", [1, 2])
def test_microbatches_without_stages(clicks: MakeConfig, world_size: int) -> None:
    config = change(clicks("mean", "dcnv2", limit=_EXAMPLES), run__dtype="float64")
    assert_equal_numbers(run_staged(change(config, pipeline__microbatches=4), world_size), run_staged(config))


@pytest.mark.parametrize(("schedule", "world_size"), [("1f1b", 2), ("zb-h1", 3), ("chimera", 2)])
def test_every_rank_can_run_all_stages(clicks: MakeConfig, schedule: str, world_size: int) -> None:
    """A pipeline of one process on each rank, whatever their number."""
    config = change(clicks("mean", "dcnv2", "adam", limit=64), run__dtype="float64", optim__dense="adam")
    placed = staged(config, schedule, 2, pipeline__processes="1", pipeline__microbatches=4)
    assert_equal_numbers(run_staged(placed, world_size), run_staged(config))


def test_locality_assignment_of_examples(clicks: MakeConfig) -> None:
    """Locality assignment is allowed if all ranks read equal parts of a batch, as both ends of two pipes do."""
    config = change(clicks("mixed", "deepfm", limit=65), run__dtype="float64", cache__rows=300)
    ours = staged(change(config, cacher__assign="locality"), "chimera", 2)
    assert_equal_numbers(run_staged(ours, 2), run_staged(config))


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    some_of([*itertools.product(["1f1b", "chimera", "graph", "zb-h1"], WORLDS)], {1, 3, 7, 11}),
)
def test_batches_smaller_than_the_microbatches(clicks: MakeConfig, schedule: str, world_size: int) -> None:
    """Some micro-batches are empty, some ranks have no example, and the last batch holds one."""
    config = change(clicks(batch_size=3, limit=19), run__dtype="float64", optim__dense="adam")
    assert_equal_numbers(run_staged(staged(config, schedule, 2), world_size), run_staged(config))


@pytest.mark.parametrize(
    ("schedule", "partition"),
    [
        ("1f1b", "dense_arch=0,inter_arch=1,over_arch.model.0=1,over_arch.model.1=2"),
        ("graph", "over_arch=0,dense_arch=2,inter_arch=1"),
    ],
)
def test_stages_by_name(clicks: MakeConfig, schedule: str, partition: str) -> None:
    """Edges of the stage graph can lead to lower numbers."""
    config = change(clicks(limit=_EXAMPLES), run__dtype="float64")
    whole = run_staged(config)
    config = staged(config, schedule, 3, pipeline__partition=partition)
    for world_size in (1, 3):
        assert_equal_numbers(run_staged(config, world_size), whole)
