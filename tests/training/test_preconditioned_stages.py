"""Stages with K-FAC: the numbers of the whole model with it, for every synchronous schedule, on ranks, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.effort import some_of
from tests.system.jobs import JobOutcome, change, run_job
from tests.system.recording import Crash, recorded
from tests.system.staging import full, run_staged, staged

MakeConfig = Callable[..., Config]

#: Six batches of twelve, and one with fewer examples than micro-batches.
_EXAMPLES = 77
KFAC: dict[str, Any] = {"optim__precondition": "kfac", "optim__kfac_damping": 0.1, "optim__kfac_inverse_every": 3}
#: Micro-batches in one pipe, in two, with split backwards, with recomputation, and with two stages of a rank.
_STATIC = [name for name in DENSE_SCHEDULES if name != "dynamic"]
_SCHEDULES = ("1f1b", "chimera", "zb-h1", "1f1b-shifted", "dualpipe-v", "breadth-first")


def config_of(clicks: MakeConfig, **values: Any) -> Config:
    return change(clicks("sum", "dlrm", "adagrad", limit=_EXAMPLES), run__dtype="float64", **{**KFAC, **values})


def assert_close(found: JobOutcome, expected: JobOutcome) -> None:
    """Equal up to the order of sums: as docs/second-order.md says of dense parameters, and of Adagrad's rows."""
    for name, value in expected.dense.items():
        torch.testing.assert_close(found.dense[name], value, rtol=0, atol=1e-12)
    for name, (ids, rows) in expected.rows.items():
        assert found.rows[name][0].tolist() == ids.tolist()
        np.testing.assert_allclose(found.rows[name][1], rows, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "schedule",
    some_of(
        _STATIC,
        [number for number, name in enumerate(_STATIC) if name in ("1f1b", "chimera", "dualpipe-v", "graph", "zb-h1")],
    ),
)
def test_every_schedule_gives_the_numbers_of_the_whole_model(clicks: MakeConfig, schedule: str) -> None:
    config = config_of(clicks)
    stages = staged(config, schedule, full(schedule, 1))
    assert_close(run_staged(stages), run_job(config))


@pytest.mark.parametrize(
    ("schedule", "lag"),
    [
        pytest.param(schedule, lag, marks=() if number % 4 == 2 * lag else pytest.mark.slow)
        for number, schedule in enumerate(_SCHEDULES)
        for lag in (0, 1)
    ],
)
def test_ranks_give_the_bits_of_one_process(clicks: MakeConfig, schedule: str, lag: int) -> None:
    """Schedules of two pipes hold a stage twice, and add up in another order."""
    config = staged(config_of(clicks, optim__kfac_lag=lag), schedule, full(schedule, 2))
    one, two = run_staged(config), run_staged(config, 2)
    if schedule == "chimera":
        assert_close(two, one)
    else:
        assert two.digests == one.digests


@pytest.mark.parametrize("factors", ["summed", "local"])
def test_a_lag_is_the_same_in_every_schedule(clicks: MakeConfig, factors: str) -> None:
    """The inverses of the batch before, wherever they are made."""
    config = config_of(clicks, optim__kfac_lag=1, optim__kfac_factors=factors)
    first, *others = [run_staged(staged(config, name, full(name, 1))) for name in ("1f1b", "gpipe", "zb-v")]
    for other in others:
        assert_close(other, first)
    plain = run_staged(config_of(clicks)).dense
    assert not all(torch.allclose(first.dense[name], value) for name, value in plain.items())


def test_replicas_of_a_pipeline_sum_or_share_out_factors(clicks: MakeConfig) -> None:
    config = staged(config_of(clicks), "1f1b", 2)
    assert_close(run_staged(config, 4), run_staged(config))
    local = run_staged(change(config, optim__kfac_factors="local"), 4)
    assert not all(torch.allclose(local.dense[name], value) for name, value in run_staged(config).dense.items())


@pytest.mark.parametrize(
    ("schedule", "world_size", "values"),
    [
        pytest.param("1f1b", 2, {"optim__kfac_lag": 1}, marks=pytest.mark.slow),
        ("1f1b", 2, {"optim__kfac_lag": 0, "optim__kfac_inverse_every": 11}),
        pytest.param("gpipe", 4, {"optim__kfac_lag": 1, "optim__kfac_factors": "local"}, marks=pytest.mark.slow),
        pytest.param("gpipe", 4, {"optim__kfac_lag": 1}, marks=pytest.mark.slow),
        pytest.param("chimera", 1, {"optim__kfac_lag": 1}, marks=pytest.mark.slow),
        ("chimera", 2, {"optim__kfac_lag": 1}),
        pytest.param("zb-h1", 1, {"optim__kfac_lag": 1, "optim__kfac_inverse_every": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_and_resumed_job_has_the_bits_of_an_uninterrupted_one(
    clicks: MakeConfig, tmp_path: Path, schedule: str, world_size: int, values: dict[str, Any]
) -> None:
    ranks = 2 if world_size > 1 else full(schedule, 1)
    # The inverses of batch 11 are those of a job that resumes from batch 12.
    config = staged(change(clicks(limit=185), **{**KFAC, **values}), schedule, ranks)
    end = recorded(config, tmp_path, every=3, world_size=world_size).run()
    job = recorded(config, tmp_path / "again", every=3, world_size=world_size)
    with pytest.raises(Crash):
        job.run(crash_at=14)
    again = job.run()
    assert again.first_batch > 0
    assert again.digests == end.digests


def test_the_place_of_the_work_changes_no_bit(clicks: MakeConfig) -> None:
    config = staged(change(clicks(limit=_EXAMPLES), **KFAC, optim__kfac_lag=1), "1f1b", 2)
    bubbles, last = (run_staged(change(config, optim__kfac_placement=place), 2) for place in ("bubbles", "last"))
    assert bubbles.digests == last.digests
