"""Where a phase ends."""

from __future__ import annotations

import pytest

from cacher.planning import PlannedData
from tests.cacher.daemons import config, spec_of


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, 18),
        ({"first_batch": 5}, 18),
        ({"first_batch": 18}, 18),
        ({"first_batch": 99}, 99),
        ({"max_steps": 7}, 7),
        ({"max_steps": 7, "first_batch": 9}, 9),
        ({"max_steps": 99}, 18),
    ],
)
def test_the_end_follows_all_batches(options: dict[str, int], end: int) -> None:
    job = config()
    data = PlannedData(job.data, job.run.seed)
    phase = data.phase("train", spec_of(job, data.schema), **options)
    for batch in phase:
        assert phase.end in (None, batch.batch.index + 1)
    assert phase.end == end


def test_a_phase_without_data_ends_where_it_begins() -> None:
    job = config(eval_fraction=0.0)
    data = PlannedData(job.data, job.run.seed)
    phase = data.phase("eval", spec_of(job, data.schema))
    assert list(phase) == []
    assert phase.end == 0


def test_a_phase_that_is_stopped_has_no_end() -> None:
    job = config()
    data = PlannedData(job.data, job.run.seed)
    phase = data.phase("train", spec_of(job, data.schema))
    next(phase)
    phase.stop()
    assert list(phase) == []
    assert phase.end is None
