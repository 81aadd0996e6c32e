"""The dense part in stages on several ranks: one device's numbers, and the bits of the same stages in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagpipe.config import Config
from bagpipe.schedule.builders import DENSE_SCHEDULES
from tests.system.jobs import JobEnd, change, run_job
from tests.system.rank_threads import RanksEnd, run_ranks
from tests.system.test_exactness import MakeConfig

MODELS = [("dlrm", "sum"), ("dcnv2", "mean"), ("deepfm", "mixed"), ("towers", "sum")]


def staged(config: Config, schedule: str, world_size: int) -> Config:
    """As many stages as the schedule puts on two ranks, or four."""
    chunks = DENSE_SCHEDULES[schedule].chunks
    num_ranks = 2 if world_size == 2 or schedule in ("interleaved", "zb-h1", "graph") else 4 // chunks
    return change(config, pipeline__schedule=schedule, pipeline__stages=num_ranks * chunks, pipeline__microbatches=8)


def close(ours: RanksEnd, reference: JobEnd) -> None:
    for name, value in reference.dense.items():
        torch.testing.assert_close(ours.dense[name], value, rtol=0, atol=1e-12)
    for name, (ids, rows) in reference.rows.items():
        np.testing.assert_array_equal(ours.rows[name][0], ids)
        np.testing.assert_allclose(ours.rows[name][1], rows, rtol=0, atol=1e-12)
    losses = sum(float(result.progress.loss_sum) for result in ours.results)
    assert losses == pytest.approx(float(reference.trained.progress.loss_sum), abs=1e-9)
    assert sum(result.progress.samples for result in ours.results) == reference.trained.progress.samples


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", DENSE_SCHEDULES)
@pytest.mark.parametrize(("model", "schema"), MODELS)
def test_every_schedule_gives_one_devices_numbers(
    clicks: MakeConfig, model: str, schema: str, schedule: str, world_size: int
) -> None:
    config = change(clicks(schema, model, "adagrad"), run__dtype="float64")
    close(run_ranks(staged(config, schedule, world_size), world_size), run_job(config))
