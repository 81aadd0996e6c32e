"""Compiled stages of asynchronous schedules: a batch has other weights than the one before, and the same code."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.dense import compiler as compiled
from tests.effort import some_of
from tests.system.jobs import change, run_job
from tests.system.recording import Crash, recorded
from tests.system.staging import run_staged, staged
from tests.system.test_exactness import MakeConfig

#: Schedules, ranks, and changes. Weights of the forward in the backward; of the newest; predicted in both.
CASES: list[tuple[str, int, dict[str, object]]] = [
    ("pipedream", 2, {"pipeline__recompute": True, "optim__dense": "adam"}),
    ("pipeoptim", 2, {"optim__momentum": 0.9, "dense__state": "host"}),
    ("spectrain", 1, {"optim__dense": "adam", "pipeline__rows_delay": 1, "pipeline__activations": "host"}),
    ("pipedream-2bw", 4, {"optim__dense": "adam", "dense__shard": "gradients"}),
    ("pipedream-vertical", 1, {"optim__dense": "adam", "dense__state": "host", "pipeline__activations": "host"}),
    ("spectrain-v2", 2, {"optim__dense": "adamw", "pipeline__backward_shares": "0.5,1"}),
    ("pipeoptim", 3, {"pipeline__replicas": "2,1", "optim__dense": "adam"}),
    ("pipedream-2bw", 2, {"model__factory": "tests.system.staged_models:dropping", "pipeline__recompute": True}),
]


@pytest.mark.parametrize(
    ("schedule", "ranks", "values"),
    some_of(CASES, {0, 1}),
    ids=[f"{name}-{number}" for number, (name, *_) in enumerate(CASES)],
)
def test_traced_code_has_the_weights_of_its_batch(
    clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, schedule: str, ranks: int, values: dict[str, object]
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    plain = staged(clicks(limit=150), schedule, 2, **values)
    config = change(plain, run__compile=True)
    expected = run_staged(plain, ranks).digests
    assert run_staged(change(config, cache__rows=300), ranks).digests == expected
    assert run_staged(change(config, cache__rows=0), ranks).digests == expected


@pytest.mark.parametrize("schedule", some_of(["pipeoptim", "pipedream", "spectrain"], {0}))
def test_a_killed_job_goes_on(
    clicks: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = staged(clicks(limit=150), schedule, 2, run__compile=True, optim__dense="adam", cache__rows=300)
    job = recorded(config, tmp_path, every=3)
    with pytest.raises(Crash):
        job.run(crash_at=8)
    direct = recorded(change(config, cache__rows=0), tmp_path, every=0).run()
    assert job.run().digests == direct.digests


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("schedule", "ranks", "values"), CASES[:3], ids=[name for name, *_ in CASES[:3]])
def test_compiled_code_has_the_weights_of_its_batch(
    clicks: MakeConfig, schedule: str, ranks: int, values: dict[str, object]
) -> None:
    plain = staged(clicks(limit=150), schedule, 2, run__dtype="float64", **values)
    config = change(plain, run__compile=True)
    cached = run_job(change(config, cache__rows=300))
    assert cached.digests == run_job(change(config, cache__rows=0)).digests
    expected = run_job(plain)
    assert cached.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, tensor in expected.dense.items():
        assert cached.dense[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-7, abs=1e-9)
