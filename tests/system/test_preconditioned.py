"""Jobs with K-FAC beside whatever else stages have: the same bits with any cache, on ranks, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.dense import compiler as compiled
from tests.effort import some_of
from tests.system.jobs import change, run_job
from tests.system.recording import Crash, recorded
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig

KFAC: dict[str, object] = {
    "optim__precondition": "kfac",
    "optim__kfac_inverse_every": 2,
    "optim__kfac_damping": 0.1,
    "pipeline__microbatches": 4,
}
LAG: dict[str, object] = {"optim__kfac_lag": 1}
LATE: dict[str, object] = {"pipeline__rows_delay": 1}

#: Schedules, and changes.
CASES: list[tuple[str, dict[str, object]]] = [
    ("pipedream", {}),
    ("pipedream-2bw", LATE),
    ("pipeoptim", {**LATE, **LAG, "optim__kfac_factors": "local"}),
    ("spectrain", LAG),
]


@pytest.mark.parametrize(("schedule", "keys"), some_of(CASES, {0, 1, 2}))
def test_weights_have_versions(clicks: MakeConfig, schedule: str, keys: dict[str, object]) -> None:
    config = staged(change(clicks(limit=150), run__dtype="float64"), schedule, 2, **{**KFAC, **keys})
    cached = run_job(change(config, cache__rows=200)).digests
    assert cached == run_job(change(config, cache__rows=0)).digests
    assert cached == run_staged(config, 2).digests
    assert cached != run_job(change(config, optim__precondition="none", optim__kfac_lag=0)).digests


@pytest.mark.parametrize("keys", [{}, LAG])
def test_lanes_choose_their_order(clicks: MakeConfig, keys: dict[str, object]) -> None:
    """Nobody knows the gaps of such an order: the work comes last."""
    config = staged(change(clicks(limit=150), run__dtype="float64"), "dynamic", 2, **{**KFAC, **keys})
    cached = run_job(change(config, cache__rows=200)).digests
    assert cached == run_job(change(config, cache__rows=0)).digests
    assert cached == run_staged(config, 2).digests
    assert_equal_numbers(run_staged(config), run_staged(change(config, pipeline__schedule="1f1b")))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "keys"),
    some_of(
        [
            ("pipedream", {}),
            ("pipedream-2bw", LAG),
            ("1f1b", {"pipeline__backward_shares": "0.25,1"}),
            ("1f1b", {"pipeline__backward_shares": "0.25,1", **LAG}),
        ],
        {1, 3},
    ),
)
def test_a_killed_job_goes_on(
    clicks: MakeConfig, schedule: str, keys: dict[str, object], ranks: int, tmp_path: Path
) -> None:
    config = change(staged(clicks(limit=300), schedule, 2, **{**KFAC, **keys}), cache__rows=200)
    job = recorded(config, tmp_path, every=3, world_size=ranks)
    with pytest.raises(Crash):
        job.run(crash_at=8)
    direct = recorded(change(config, cache__rows=0), tmp_path, every=0, world_size=ranks).run()
    assert job.run().digests == direct.digests


#: Schedules, ranks, and changes.
COMPILED: list[tuple[str, int, dict[str, object]]] = [
    ("none", 1, {"pipeline__microbatches": 1, "optim__kfac_factors": "local"}),
    ("1f1b", 1, {"pipeline__recompute": True, "pipeline__backward_shares": "0.5,1"}),
    ("zb-h1", 2, LAG),
    ("pipeoptim", 2, {"optim__dense": "adam"}),
    ("none", 2, {"pipeline__microbatches": 1}),
    ("chimera", 1, {"pipeline__activations": "host"}),
    ("zb-h1", 4, {"dense__shard": "gradients", "pipeline__recompute": True}),
    ("dynamic", 1, {}),
]


def compiling(config: Config, schedule: str, values: dict[str, object]) -> Config:
    """A job with K-FAC and compiled code."""
    config = change(config, run__compile=True, **{**KFAC, **values})
    return config if schedule == "none" else staged(config, schedule, 2, **{**KFAC, **values})


@pytest.mark.parametrize(
    ("schedule", "ranks", "values"),
    some_of(COMPILED, {0, 1, 2}),
    ids=[f"{name}-{number}" for number, (name, *_) in enumerate(COMPILED)],
)
def test_traced_layers_show_their_inputs(
    clicks: MakeConfig, monkeypatch: pytest.MonkeyPatch, schedule: str, ranks: int, values: dict[str, object]
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = compiling(clicks(limit=100), schedule, values)
    expected = run_staged(change(config, run__compile=False), ranks).digests
    assert run_staged(change(config, cache__rows=200), ranks).digests == expected
    assert run_staged(change(config, cache__rows=0), ranks).digests == expected


@pytest.mark.parametrize(("schedule", "values"), some_of([("zb-h1", LAG), ("none", {})], {0}))
def test_a_killed_job_with_traced_layers_goes_on(
    clicks: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, values: dict[str, object]
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    config = change(compiling(clicks(limit=150), schedule, values), cache__rows=200)
    job = recorded(config, tmp_path, every=3)
    with pytest.raises(Crash):
        job.run(crash_at=8)
    assert job.run().digests == recorded(change(config, cache__rows=0), tmp_path, every=0).run().digests


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("schedule", "ranks", "values"), COMPILED[:4], ids=[name for name, *_ in COMPILED[:4]])
def test_compiled_layers_show_their_inputs(
    clicks: MakeConfig, schedule: str, ranks: int, values: dict[str, object]
) -> None:
    config = compiling(change(clicks(limit=100), run__dtype="float64"), schedule, values)
    found = run_staged(change(config, cache__rows=200), ranks)
    assert found.digests == run_staged(change(config, cache__rows=0), ranks).digests
    plain = run_staged(change(config, run__compile=False), ranks)
    for name, tensor in plain.dense.items():
        assert found.dense[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-7, abs=1e-9)
