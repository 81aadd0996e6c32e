"""A cacher whose indexing is in shards sends the batches of one that indexes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.errors import InputError
from cacher.planning import PlannedData
from tests.cacher.daemons import config, planned_batches, spec_of
from tests.cacher.sharding import assert_same_ranks, batches_of, data_of, sharded
from tests.data.files import criteo_lines

pytestmark = pytest.mark.multiproc


def test_local_shards_whatever_the_assignment_of_examples() -> None:
    """One set of shards serves all phases: their settings differ in nothing that they use."""
    job = sharded(config(limit=600, batch_size=50, lookahead=5), "3")
    with data_of(job) as data:
        for world_size, phase in ((1, "train"), (3, "train"), (2, "eval")):
            assert_same_ranks(
                batches_of(data, job, world_size, phase=phase),
                planned_batches(job, world_size, phase),  # type: ignore[arg-type]
            )
        first = data.phase("train", spec_of(job, data.schema, 2), max_steps=3)
        assert ([batch.batch.index for batch in first], first.end) == ([0, 1, 2], 3)
        resumed = planned_batches(job, 2, first_batch=4)
        state = batches_of(data, job, 2)[0][3].batch.reader_state
        assert_same_ranks(batches_of(data, job, 2, first_batch=4), resumed)
        assert_same_ranks(batches_of(data, job, 2, first_batch=4, reader_state=state), resumed)


@pytest.mark.parametrize("lookahead", [3, 6])
def test_batches_before_bad_data_are_sent(lookahead: int, tmp_path: Path) -> None:
    """With a window ahead of the planner and without one, as by one process. A job that ends before it ends well."""
    (tmp_path / "day_0").write_bytes(criteo_lines(500))
    (tmp_path / "day_1").write_bytes(criteo_lines(20) + b"bad\n")
    job = config(format="criteo-tsv", path=str(tmp_path), limit=0, lookahead=lookahead, eval_fraction=0.0)

    def sent(data: PlannedData, max_steps: int = 0) -> tuple[list[int], str]:
        phase = data.phase("train", spec_of(job, data.schema, 2), max_steps=max_steps)
        found = []
        try:
            for batch in phase:
                found.append(batch.batch.index)
        except InputError as error:
            return found, str(error)
        finally:
            phase.close()
        return found, ""

    whole, error = expected = sent(PlannedData(job.data, job.run.seed))
    assert len(whole) > 2 * lookahead - 3
    assert "day_1" in error
    with data_of(sharded(job, "2")) as data:
        assert sent(data) == expected
        assert sent(data, max_steps=len(whole) - 2) == (whole[:-2], "")
