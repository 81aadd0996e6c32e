"""The dense part in stages: every schedule gives the numbers of one device, and bits that no cache changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagpipe.config import Config
from bagpipe.schedule.builders import DENSE_SCHEDULES
from tests.system.jobs import JobEnd, change, run_job
from tests.system.test_exactness import MakeConfig

MODELS = [("dlrm", "sum"), ("dcnv2", "mean"), ("deepfm", "mixed"), ("wide-deep", "ragged"), ("towers", "sum")]
STAGES = 4
MICROBATCHES = 8


def staged(config: Config, schedule: str, **values: object) -> Config:
    given = {"pipeline__stages": STAGES, "pipeline__microbatches": MICROBATCHES, **values}
    return change(config, pipeline__schedule=schedule, **given)


def close(ours: JobEnd, reference: JobEnd) -> None:
    np.testing.assert_allclose(ours.losses, reference.losses, rtol=0, atol=1e-12)
    for name, value in reference.dense.items():
        torch.testing.assert_close(ours.dense[name], value, rtol=0, atol=1e-12)
    for name, (ids, rows) in reference.rows.items():
        np.testing.assert_array_equal(ours.rows[name][0], ids)
        np.testing.assert_allclose(ours.rows[name][1], rows, rtol=0, atol=1e-12)
    assert ours.auc == pytest.approx(reference.auc, abs=1e-12)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], JobEnd]:
    return {}


@pytest.mark.parametrize("schedule", DENSE_SCHEDULES)
@pytest.mark.parametrize(("model", "schema"), MODELS)
def test_every_schedule_gives_one_devices_numbers(
    clicks: MakeConfig, references: dict[tuple[str, str], JobEnd], model: str, schema: str, schedule: str
) -> None:
    config = change(clicks(schema, model, "adagrad"), run__dtype="float64")
    if (model, schema) not in references:
        references[model, schema] = run_job(config)
    close(run_job(staged(config, schedule)), references[model, schema])
