"""Whole models with K-FAC: with and without a cache, resumed, and on several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.training.engine import Engine
from tests.effort import some_of
from tests.system.jobs import change, run_job
from tests.system.rank_threads import run_ranks
from tests.system.recording import Crash, recorded
from tests.training.test_preconditioned_stages import assert_close

MakeConfig = Callable[..., Config]

KFAC: dict[str, Any] = {"optim__precondition": "kfac", "optim__kfac_inverse_every": 3}


def test_cached_equals_direct_and_differs_from_plain_steps(clicks: MakeConfig) -> None:
    config = change(clicks(eval_fraction=0.2), **KFAC)
    cached, direct = run_job(config), run_job(change(config, cache__rows=0))
    assert cached.digests == direct.digests
    assert cached.auc == direct.auc
    assert cached.digests != run_job(clicks(eval_fraction=0.2)).digests


@pytest.mark.parametrize(
    ("inverse_every", "factors"), some_of([(1, "summed"), (1, "local"), (11, "summed"), (11, "local")], {1, 2})
)
def test_a_killed_and_resumed_job_has_the_bits_of_an_uninterrupted_one(
    clicks: MakeConfig, tmp_path: Path, factors: str, inverse_every: int
) -> None:
    values = {**KFAC, "optim__kfac_factors": factors, "optim__kfac_inverse_every": inverse_every}
    # The inverses of batch 11 are those of a job that resumes from batch 12.
    config = change(clicks(limit=185), **values)
    end = recorded(config, tmp_path, every=3, world_size=2).run()
    job = recorded(config, tmp_path / "again", every=3, world_size=2)
    with pytest.raises(Crash):
        job.run(crash_at=14)
    again = job.run()
    assert again.first_batch > 0
    assert again.digests == end.digests


def test_a_checkpoint_of_two_ranks_goes_on_with_one(clicks: MakeConfig, tmp_path: Path) -> None:
    """A rank takes over the layers of others: the same sums in another order."""
    config = change(clicks(), **KFAC, run__dtype="float64")
    engines: list[Engine] = []
    recorded(config, tmp_path, every=3, world_size=1, prepare=engines.append).run()
    job = recorded(config, tmp_path / "again", every=3, world_size=2, prepare=engines.append)
    job.change_batches = lambda rank, batches: itertools.islice(batches, 8)
    job.run()
    job.change_batches = lambda rank, batches: batches
    job.world_size = 1
    assert job.run().first_batch == 8
    expected, found = (engine.dense.model.state_dict() for engine in (engines[0], engines[-1]))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_more_ranks_change_the_order_of_sums_only(clicks: MakeConfig) -> None:
    config = change(clicks(limit=125), **KFAC, run__dtype="float64")
    one, two = run_job(config), run_ranks(config, 2)
    assert_close(two, one)
    local = run_ranks(change(config, optim__kfac_factors="local"), 2)
    assert any(not torch.allclose(value, one.dense[name], atol=1e-6) for name, value in local.dense.items())


def test_a_singular_factor_ends_the_job_in_one_line(clicks: MakeConfig) -> None:
    with pytest.raises(InputError, match=r"^K-FAC: factor [AG] of layer .* is singular with damping 0; expected more"):
        run_job(change(clicks(), **KFAC, optim__kfac_damping=0.0))
