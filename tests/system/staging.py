"""Jobs with a staged dense part: their configurations, and comparison with the job that trains the whole model.

config ──staged(schedule, num_ranks)──> config ──run_staged(world_size)──> outcome: one process or one thread per rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bagpipe.config.sections import Config
from bagpipe.schedule.registry import TRAINED_SCHEDULES
from tests.system.jobs import JobOutcome, change, run_job
from tests.system.rank_threads import run_ranks

__all__ = ["DIGESTED", "MODELS", "StagedOutcome", "assert_equal_numbers", "full", "of_job", "run_staged", "staged"]

#: Models, each with a schema it supports.
MODELS = [
    ("dlrm", "sum"),
    ("dcnv2", "mean"),
    ("deepfm", "mixed"),
    ("wide-deep", "ragged"),
    ("towers", "sum"),
    ("dcnv2-fuxictr", "ragged"),
    ("deepfm-fuxictr", "mixed"),
    ("finalmlp", "mean"),
]

#: One schedule of each kind: a chain, a free order, a graph, two pipes, a V with split backwards, a V with overlap.
DIGESTED = ("1f1b", "dynamic", "graph", "chimera", "zb-v", "dualpipe-v")

MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedOutcome:
    """Final numbers of a job on any number of ranks.

    Attributes:
        rows: per table name, ids in ascending order and their records.
        dense: parameters by name.
        loss_sum: of all training examples.
    """

    digests: tuple[str, str]
    rows: dict[str, tuple[NDArray[np.int64], NDArray[Any]]]
    dense: dict[str, torch.Tensor]
    loss_sum: float
    samples: int


def staged(config: Config, schedule: str, num_ranks: int, **values: object) -> Config:
    """`config` on that many pipeline ranks; `values` are changes as in `change` and take precedence."""
    stages = num_ranks * TRAINED_SCHEDULES[schedule].chunks
    given = {"pipeline__stages": stages, "pipeline__microbatches": MICROBATCHES, **values}
    if TRAINED_SCHEDULES[schedule].uses_costs:
        given = {"pipeline__costs": "F=1,1F=2,I=1.5,W=1", **given}
    return change(config, pipeline__schedule=schedule, **given)


def full(schedule: str, world_size: int) -> int:
    """Pipeline ranks: four stages if one process runs all, otherwise as many as the small models' operators fill."""
    chunks = TRAINED_SCHEDULES[schedule].chunks
    if world_size == 1:
        return 4 // chunks
    return 2 if world_size == 2 or schedule in ("interleaved", "zb-h1", "graph") else 4 // chunks


def run_staged(config: Config, world_size: int = 1) -> StagedOutcome:
    """Run the job; several ranks are threads."""
    if world_size == 1:
        return of_job(run_job(config))
    end = run_ranks(config, world_size)
    return StagedOutcome(
        digests=end.digests,
        rows=end.rows,
        dense=end.dense,
        loss_sum=sum(float(result.progress.loss_sum) for result in end.results),
        samples=sum(result.progress.samples for result in end.results),
    )


def of_job(end: JobOutcome) -> StagedOutcome:
    """Final numbers of a job of one process, for comparison."""
    progress = end.trained.progress
    return StagedOutcome(
        digests=end.digests,
        rows=end.rows,
        dense=end.dense,
        loss_sum=float(progress.loss_sum),
        samples=progress.samples,
    )


def assert_equal_numbers(ours: StagedOutcome, reference: StagedOutcome) -> None:
    """Assert in float64: dense parameters, every row with its optimizer state, and the mean loss agree within 1e-12."""
    assert ours.dense.keys() == reference.dense.keys()
    for name, value in reference.dense.items():
        torch.testing.assert_close(ours.dense[name], value, rtol=0, atol=1e-12)
    assert ours.rows.keys() == reference.rows.keys()
    for name, (ids, rows) in reference.rows.items():
        np.testing.assert_array_equal(ours.rows[name][0], ids)
        np.testing.assert_allclose(ours.rows[name][1], rows, rtol=0, atol=1e-12)
    assert ours.samples == reference.samples
    assert ours.loss_sum / ours.samples == pytest.approx(reference.loss_sum / reference.samples, abs=1e-12)
