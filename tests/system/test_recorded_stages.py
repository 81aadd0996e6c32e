"""Jobs whose stages replay forwards and backwards, with a CPU fake of CUDA graphs, end with the bits of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.sections import Config
from bagpipe.dense import compiler as compiled
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.graphs import Recording, Work
from bagpipe.testing.repeated_calls import RepeatedCalls
from tests.effort import some_of
from tests.system.jobs import change, run_job
from tests.system.recording import Crash, recorded
from tests.system.resumed import JOB
from tests.system.staging import run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import run_to_the_end, whole_job
from tests.system.test_resume_ranks import STAGES, config_of, numbers
from trainer import dense as trainer_dense


class Counted(RepeatedCalls):
    """Counts captures."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, *works: Work) -> tuple[Recording, ...]:
        self.recorded += 1
        return super().record(*works)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The fake of every rank."""
    found = Counted()
    monkeypatch.setattr("trainer.dense.open_graphs", lambda device: found)
    return found


def job(clicks: MakeConfig, schedule: str, model: str = "dcnv2", limit: int = 120, **values: object) -> Config:
    """Two pipeline ranks; the last of ten batches is smaller, if there is no limit given."""
    config = clicks({"deepfm": "mixed", "dlrm": "sum"}.get(model, "mean"), model, limit=limit, eval_fraction=0.1)
    return change(staged(config, schedule, 2, pipeline__microbatches=4), **{"cache__rows": 70, **values})


#: Schedule, ranks, and what varies besides.
JOBS: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 1, {}),
    ("gpipe", 2, {"run__autocast": "bfloat16", "run__loss_scale": 64}),
    ("dynamic", 2, {}),
    ("graph", 1, {"pipeline__stage_microbatches": "2,4"}),
    ("chimera", 2, {}),
    ("zb-h1", 2, {}),
    ("zb-v", 1, {}),
    ("dualpipe-v", 2, {}),
    ("interleaved", 2, {}),
    ("1f1b", 2, {"pipeline__recompute": True}),
    ("1f1b-shifted", 1, {"pipeline__recompute_share": "0.5"}),
    ("gpipe", 2, {"pipeline__backward_shares": "0.5,1"}),
    ("zb-h1", 1, {"pipeline__backward_shares": "0.5,1", "optim__clip_norm": 0.05, "optim__clip_scope": "all"}),
    ("1f1b", 4, {"pipeline__stages": 3, "pipeline__replicas": "2,1,1"}),
    ("1f1b", 4, {"dense__shard": "gradients", "optim__dense": "adam"}),
    ("chimera", 4, {"dense__shard": "optimizer", "optim__dense": "adam"}),
    ("pipedream", 2, {"pipeline__recompute": True}),
    ("pipedream-vertical", 1, {}),
    ("pipedream-2bw", 4, {"dense__shard": "gradients", "optim__dense": "adam"}),
    ("spectrain", 2, {"optim__dense": "sgd", "optim__momentum": 0.9}),
    ("spectrain", 1, {"pipeline__recompute": True, "pipeline__rows_delay": 1, "cache__rows": 140}),
    ("spectrain-v2", 2, {"pipeline__rows_delay": 1, "cache__rows": 140, "optim__dense": "adam"}),
    ("pipeoptim", 1, {"pipeline__backward_shares": "0.5,1", "optim__dense": "adamw"}),
    ("1f1b", 2, {"run__nonfinite": "skip", "run__loss_scale_growth_interval": 3, "optim__ema_decay": 0.9}),
]


@pytest.mark.parametrize(("schedule", "ranks", "values"), some_of(JOBS, {1, 2, 3, 5, 7, 9, 11, 13, 14, 16, 18, 20, 23}))
def test_replayed_micro_batches_keep_the_bits(
    clicks: MakeConfig, graphs: Counted, schedule: str, ranks: int, values: dict[str, Any]
) -> None:
    config = job(clicks, schedule, **values)
    expected = run_staged(config, ranks)
    assert graphs.recorded == 0
    replayed = run_staged(change(config, run__cuda_graph=True), ranks)
    assert graphs.recorded
    assert replayed.digests == expected.digests
    assert replayed.loss_sum == expected.loss_sum > 0


@pytest.mark.parametrize("schedule", some_of(["1f1b", "dynamic", "zb-v"], {1}))
def test_a_cache_changes_no_bit(clicks: MakeConfig, schedule: str) -> None:
    config = job(clicks, schedule, "deepfm", run__cuda_graph=True)
    assert run_job(config).digests == run_job(change(config, cache__rows=0)).digests


@pytest.mark.parametrize("microbatches", [3, 5])
def test_micro_batches_without_stages_have_recordings_of_each_size(
    clicks: MakeConfig, graphs: Counted, microbatches: int
) -> None:
    """12 examples are micro-batches of 4, or of 2 and 3. One is under way at a time."""
    config = change(clicks("sum", "dlrm", limit=120), pipeline__microbatches=microbatches, cache__rows=70)
    expected = run_job(config).digests
    assert run_job(change(config, run__cuda_graph=True)).digests == expected
    assert graphs.recorded == {3: 1, 5: 2}[microbatches]


@pytest.mark.parametrize("schedule", some_of(["1f1b", "zb-h1"], {1}))
def test_compiled_stages_are_replayed(clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    """A backend without generated code takes seconds."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = job(clicks, schedule, limit=40, run__compile=True)
    assert run_job(change(config, run__cuda_graph=True)).digests == run_job(config).digests


@pytest.mark.parametrize(
    ("schedule", "ranks", "values"),
    [
        ("zb-h1", 1, {}),
        ("1f1b", 4, {"dense__shard": "gradients", "optim__dense": "adam"}),
        ("spectrain", 1, {"optim__dense": "adagrad"}),
    ],
)
def test_a_killed_job_goes_on_with_the_same_bits(
    clicks: MakeConfig, tmp_path: Path, schedule: str, ranks: int, values: dict[str, Any]
) -> None:
    config = job(clicks, schedule, limit=168, run__cuda_graph=True, **values)
    expected = recorded(change(config, run__cuda_graph=False), tmp_path, every=2, world_size=ranks).run()
    killed = recorded(config, tmp_path, every=2, world_size=ranks)
    with pytest.raises(Crash):
        killed.run(crash_at=9)
    again = killed.run()
    assert again.first_batch > 0
    assert (again.digests, again.totals) == (expected.digests, expected.totals)


def test_random_numbers_are_refused(clicks: MakeConfig) -> None:
    config = change(clicks("ragged", "dcnv2-fuxictr"), model__dropout=0.1, pipeline__microbatches=2)
    with pytest.raises(InputError, match=r"^run.cuda_graph is not possible for a model that draws random numbers"):
        run_job(change(config, run__cuda_graph=True))


def replaying_job(membership: Membership, config: Config) -> dict[str, Any]:
    """One rank, with the fake."""
    trainer_dense.open_graphs = lambda device: RepeatedCalls()
    return whole_job(membership, config)


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize("level", some_of(["none", "optimizer", "gradients"], {0, 2}))
def test_whole_models_on_ranks_are_replayed_on_each_level(level: str) -> None:
    """Hooks send each gradient when the replay is enqueued."""
    config = change(config_of([*JOB, "--optim.dense", "adam", "--data.limit", "600"]), dense__shard=level)
    replayed = run_to_the_end(change(config, run__cuda_graph=True), 2, replaying_job)
    assert numbers(replayed) == numbers(run_to_the_end(config, 2))


@pytest.mark.redis
@pytest.mark.multiproc
def test_the_reference_finds_what_replays_compute() -> None:
    """A difference beyond rounding would end the job."""
    config = config_of([*JOB, *STAGES, "--run.verify", "4", "--data.limit", "600"])
    replayed = run_to_the_end(change(config, run__cuda_graph=True), 2, replaying_job)
    assert numbers(replayed) == numbers(run_to_the_end(config, 2))
