"""The real sample, if present: cached equals direct on the device, and the AUC equals the CPU's to four places."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from bagpipe.config.sections import DataConfig
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema
from data.formats import open_source
from data.loader import open_loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not os.environ.get("BAGPIPE_CRITEO_SAMPLE"), reason="no real sample")]


@cache
def sample() -> tuple[DataSchema, tuple[Batch, ...], tuple[Batch, ...]]:
    """Schema, training and held-out batches."""
    path = Path(os.environ["BAGPIPE_CRITEO_SAMPLE"])
    config = DataConfig(path=str(path), format="criteo-tsv", batch_size=1024, eval_fraction=0.1, workers=0)
    with open_loader(config, seed=0, phase="train") as train, open_loader(config, seed=0, phase="eval") as held_out:
        return open_source(config, 0).schema, tuple(train), tuple(held_out)


def area_under_curve(logits: Tensor, labels: Tensor) -> float:
    """By ranks, ties counting half (Mann and Whitney)."""
    scores, positive = logits.double().numpy(), labels.numpy() > 0.5
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def train(device: str, cache_rows: int) -> tuple[tuple[str, str], float]:
    """Digests and AUC."""
    schema, batches, held_out = sample()
    settings = PlainSettings(
        schema=schema,
        device=device,
        cache_rows=cache_rows,
        lookahead=32,
        dim=16,
        bottom_mlp=(512, 256, 64),
        top_mlp=(512, 256),
        rows="adagrad",
        rows_lr=0.02,
        dense_lr=0.05,
    )
    with PlainJob(settings) as job:
        job.train(batches)
        return job.digests(), area_under_curve(*job.score(held_out))


@pytest.mark.timeout(600)
def test_the_real_sample(device: str) -> None:
    direct, auc = train(device, 0)
    for cache_rows in (20_000, 60_000):
        assert train(device, cache_rows) == (direct, auc)
    _, auc_of_cpu = train("cpu", 60_000)
    # Rounding first could separate two adjacent values: the CPU's is 0.640355.
    assert auc == pytest.approx(auc_of_cpu, abs=5e-5)
    assert auc > 0.6, "better than guessing"
