"""Staged dense part, bit for bit: settings that must not change the digests, in one process and in rank threads.

Equal schedule, stages and micro-batches give equal bits for any cache, lookahead and prefetch depth, with or without
recomputation, and for any placement of stages. The last holds for one replica with one pipe: if several ranks read
examples, each sums its own part of a row's gradient first, as ranks do without stages.
"""

from __future__ import annotations

import pytest

from bagpipe.config.sections import Config
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, DENSE_SCHEDULES, TRAINED_SCHEDULES
from tests.effort import some_of
from tests.system.jobs import change, largest_batch, run_job
from tests.system.staging import DIGESTED, assert_equal_numbers, of_job, run_staged, staged
from tests.system.test_exactness import MakeConfig


def digests_of(config: Config, world_size: int = 1) -> tuple[str, str]:
    return run_staged(config, world_size).digests


def cached(config: Config, num_owners: int = 1) -> list[Config]:
    """Caches, lookaheads and depths that differ from direct mode and from each other."""
    smallest = -(-largest_batch(config) // num_owners)
    return [
        change(config, cache__rows=smallest, oracle__lookahead=8, cache__prefetch_depth=1),
        change(config, cache__rows=2000, oracle__lookahead=1, cache__prefetch_depth=4),
    ]


PLACES = [
    *((name, ranks) for name in DIGESTED for ranks in (2, 4) if ranks * DENSE_SCHEDULES[name].chunks <= 4),
    *((name, 2) for name in ASYNCHRONOUS_SCHEDULES),
]
#: A chain and two pipes on four ranks, a graph and a V on two, and two schedules that read older parameters.
TELLING = [("1f1b", 4), ("chimera", 4), ("graph", 2), ("zb-v", 2), ("pipedream", 2), ("pipeoptim", 2)]


@pytest.mark.parametrize(("schedule", "num_ranks"), some_of(PLACES, [PLACES.index(place) for place in TELLING]))
def test_cache_and_placement_change_no_bit(clicks: MakeConfig, schedule: str, num_ranks: int) -> None:
    config = change(staged(clicks("mixed", "deepfm", limit=64), schedule, num_ranks), cache__rows=0)
    here, there = digests_of(config), digests_of(config, num_ranks)
    for other in cached(config):
        assert digests_of(other) == here
    assert digests_of(cached(config, num_ranks)[0], num_ranks) == there
    assert digests_of(config) == here, "run again"
    if TRAINED_SCHEDULES[schedule].num_pipes == 1:
        assert there == here
    else:
        assert there != here, "the docstring above can promise more"


@pytest.mark.parametrize("schedule", some_of(DIGESTED, {1, 3, 5}))
def test_recomputing_changes_no_bit(clicks: MakeConfig, schedule: str) -> None:
    config = staged(clicks("ragged", "wide-deep", "adam", limit=64), schedule, 2)
    half = change(config, pipeline__recompute=True, pipeline__recompute_share="0.5", pipeline__activations="host")
    level = change(config, pipeline__recompute=True, pipeline__recompute_share="auto")
    kept = digests_of(config)
    assert digests_of(half) == kept
    assert digests_of(level, 2) == (kept if schedule != "chimera" else digests_of(config, 2))


@pytest.mark.parametrize(
    ("schedule", "rows", "dense"), [("1f1b", "rowwise_adagrad", "adam"), ("chimera", "sgd", "sgd")]
)
def test_replicas_of_a_pipeline(clicks: MakeConfig, schedule: str, rows: str, dense: str) -> None:
    """Two replicas of two stages give one device's numbers and direct mode's bits."""
    config = change(clicks("mean", "dcnv2", rows, limit=64), run__dtype="float64", optim__dense=dense)
    whole, config = run_staged(config), staged(config, schedule, 2)
    direct = run_staged(change(config, cache__rows=0), 4)
    assert_equal_numbers(direct, whole)
    for other in cached(config, 4):
        assert digests_of(other, 4) == direct.digests


@pytest.mark.parametrize(
    ("schedule", "replicas", "stage_microbatches"),
    some_of([("1f1b", "2,1,1", ""), ("graph", "1,2,1", "4,2,8"), ("zb-h1", "1,1,2", "")], {1}),
)
def test_stages_on_ranks_of_their_own_number(
    clicks: MakeConfig, schedule: str, replicas: str, stage_microbatches: str
) -> None:
    """Three stages on four ranks give one process's bits, cached and direct, and the numbers of the whole model."""
    config = change(clicks("sum", "dlrm", limit=64), run__dtype="float64", optim__dense="adam")
    whole = run_staged(config)
    planned = {
        "pipeline__stages": 3,
        "pipeline__replicas": replicas,
        "pipeline__stage_microbatches": stage_microbatches,
    }
    config = change(staged(config, schedule, 3, **planned), cache__rows=0)
    there = run_staged(config, 4)
    assert there.digests == digests_of(config)
    assert_equal_numbers(there, whole)
    assert digests_of(cached(config, 4)[0], 4) == there.digests


@pytest.mark.parametrize("world_size", [1, 2])
def test_microbatches_without_stages(clicks: MakeConfig, world_size: int) -> None:
    config = change(clicks(limit=64), pipeline__microbatches=4, cache__rows=0, optim__dense="adam")
    direct = digests_of(config, world_size)
    for other in cached(config, world_size):
        assert digests_of(other, world_size) == direct


@pytest.mark.parametrize("schedule", some_of(DIGESTED, {0, 2, 3}))
def test_dropout_depends_only_on_the_example(clicks: MakeConfig, schedule: str) -> None:
    """Dropout depends on the example, not on the placement of the stage, its time, or the number of its runs."""
    factory = "tests.system.staged_models:dropping"
    config = staged(change(clicks("sum", limit=64), model__factory=factory), schedule, 2)
    first = digests_of(config)
    assert digests_of(change(config, pipeline__recompute=True, cache__rows=0)) == first
    assert digests_of(change(config, run__seed=1)) != first
    if schedule != "chimera":
        assert digests_of(config, 2) == first


@pytest.mark.parametrize("schedule", some_of(["1f1b", "graph", "chimera", "zb-v"], {1, 2}))
def test_two_heads(clicks: MakeConfig, schedule: str) -> None:
    """The loss is the sum of both heads; the numbers equal the whole model's, held-out examples included."""
    config = change(clicks("sum", limit=64, eval_fraction=0.2), run__dtype="float64")
    config = change(config, model__factory="tests.system.staged_models:two_heads")
    whole, config = run_job(config), staged(config, schedule, 2)
    ours = run_job(config)
    assert_equal_numbers(of_job(ours), of_job(whole))
    assert (ours.auc, ours.ne) == (pytest.approx(whole.auc, abs=1e-12), pytest.approx(whole.ne, abs=1e-12))
    there = run_staged(config, 2)
    assert_equal_numbers(there, of_job(whole))
    if schedule != "chimera":
        assert there.digests == ours.digests


@pytest.mark.parametrize(
    ("schedule", "keys"),
    [
        ("pipedream", {}),
        ("spectrain", {"pipeline__rows_delay": 1}),
        ("pipeoptim", {"pipeline__recompute": True}),
        ("pipedream-2bw", {"pipeline__rows_delay": 1, "model__factory": "tests.system.staged_models:dropping"}),
    ],
)
def test_activations_of_asynchronous_stages_go_to_the_host(
    clicks: MakeConfig, schedule: str, keys: dict[str, object]
) -> None:
    """Weights of batches stay, also where backwards have other ones than their forwards."""
    config = staged(clicks(limit=150), schedule, 2, pipeline__microbatches=4, **keys)
    host = change(config, pipeline__activations="host", cache__rows=200)
    assert run_job(host).digests == run_job(config).digests
    assert run_staged(change(host, cache__rows=0), 2).digests == run_staged(config, 2).digests


@pytest.mark.parametrize(
    ("schedule", "replicas", "keys"),
    [
        ("pipedream", "2,1", {}),
        ("pipeoptim", "1,2", {}),
        ("pipedream", "2,1", {"pipeline__rows_delay": 1}),
        ("spectrain", "1,2,1", {"pipeline__rows_delay": 1, "pipeline__recompute": True}),
        ("pipeoptim", "2,1", {"pipeline__rows_delay": 1, "dense__shard": "optimizer"}),
        pytest.param("spectrain-v2", "2,1,2", {"pipeline__rows_delay": 1}, marks=pytest.mark.slow),
        pytest.param("pipedream-2bw", "2,2", {"pipeline__rows_delay": 1}, marks=pytest.mark.slow),
        pytest.param("pipeoptim", "1,2", {"pipeline__rows_delay": 1, "dense__state": "host"}, marks=pytest.mark.slow),
        pytest.param(
            "pipedream",
            "2,1",
            {
                "pipeline__rows_delay": 1,
                "optim__precondition": "kfac",
                "optim__kfac_lag": 1,
                "optim__kfac_factors": "local",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_asynchronous_stages_have_replicas_of_their_own(
    clicks: MakeConfig, schedule: str, replicas: str, keys: dict[str, object]
) -> None:
    """Every holder of a stage has its versions. One process with all lanes has the same bits."""
    counts = [int(count) for count in replicas.split(",")]
    log = clicks("sum", "dlrm", limit=150)
    config = change(staged(log, schedule, len(counts), pipeline__microbatches=4), run__dtype="float64")
    config = change(config, pipeline__replicas=replicas, optim__dense="adam", **keys)
    direct, cached = (run_staged(change(config, cache__rows=rows), sum(counts)) for rows in (0, 200))
    assert cached.digests == direct.digests
    here = change(config, dense__shard="none", dense__state="device")
    alone = run_staged(here)
    if "optim__precondition" not in keys:  # ranks have factors of their own
        assert alone.digests == direct.digests
        assert_equal_numbers(direct, run_staged(change(here, pipeline__replicas="")))


@pytest.mark.parametrize("replicas", ["2,1", pytest.param("1,2,2", marks=pytest.mark.slow)])
def test_a_free_order_has_replicas_of_single_stages(clicks: MakeConfig, replicas: str) -> None:
    """Ranks, one process, any cache and a fixed order have the same bits."""
    counts = [int(count) for count in replicas.split(",")]
    config = change(clicks("sum", "dlrm", limit=100), run__dtype="float64", optim__dense="adam")
    config = staged(config, "dynamic", len(counts), pipeline__replicas=replicas)
    there = run_staged(change(config, cache__rows=0), sum(counts))
    assert run_staged(config, sum(counts)).digests == there.digests
    assert run_staged(config).digests == there.digests
    assert run_staged(change(config, pipeline__schedule="1f1b"), sum(counts)).digests == there.digests
    assert_equal_numbers(there, run_staged(change(config, pipeline__replicas="")))
