"""A shard that is lost comes back, or ends the job with its name."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagpipe.errors import JobError
from cacher.planning import PlannedData
from tests.cacher.daemons import Daemon, assert_same_batches, children_of, config, planned_batches, served, spec_of
from tests.cacher.sharding import data_of, sharded

pytestmark = pytest.mark.multiproc


def kill(data: PlannedData, number: int) -> None:
    assert data.shards is not None
    os.kill(int(data.shards.names()[number].partition("process ")[2].rstrip(")")), signal.SIGKILL)


def test_a_local_shard_that_is_killed_is_started_again() -> None:
    job = sharded(config(limit=2000, batch_size=20, lookahead=6), "2")
    with data_of(job) as data:
        before = data.shards.names()[1]  # type: ignore[union-attr]
        batches = []
        for batch in data.phase("train", spec_of(job, data.schema, 2)):
            if batch.batch.index == 11:
                kill(data, 1)
            batches.append(batch)
        for rank, expected in enumerate(planned_batches(job, 2)):
            assert_same_batches([batch.for_rank(rank) for batch in batches], expected)
        assert data.shards is not None
        assert data.shards.names()[1] != before
        assert data.shards.totals[1].losses


def kill_next(known: set[int]) -> None:
    """Wait for a process that this one has not started before, and kill it."""
    while not (started := set(children_of("self")) - known):
        pass
    known |= started
    for pid in started:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kills", [2, 3])
def test_a_shard_that_is_killed_while_it_starts_again_is_lost_once_more(kills: int) -> None:
    """Two losses at a batch are borne; the third ends the job."""
    job = sharded(config(limit=2000, batch_size=20, lookahead=6), "2")
    with data_of(job) as data:
        phase = data.phase("train", spec_of(job, data.schema, 1))
        batches, known = [next(phase)], set(children_of("self"))
        kill(data, 1)
        for _ in range(kills - 1):
            kill_next(known)
        if kills == 2:
            assert_same_batches([batch.for_rank(0) for batch in [*batches, *phase]], planned_batches(job)[0])
        else:
            with pytest.raises(
                JobError, match=r"shard 1 \(process \d+\) was lost at batch \d+ and is not back: it ended while"
            ):
                list(phase)


def test_a_shard_of_others_that_is_lost_ends_the_job_with_its_name(tmp_path: Path) -> None:
    job = config(limit=2000, batch_size=10, lookahead=2, timeout_s=3)
    with ExitStack() as stack:
        one = stack.enter_context(served(job, f"unix:{tmp_path}/one.sock"))
        other = stack.enter_context(Daemon(job, f"unix:{tmp_path}/other.sock"))
        ours = sharded(job, str(one.address), other.url)
        data = stack.enter_context(data_of(ours))
        phase = data.phase("train", spec_of(ours, data.schema, 2))
        next(phase)
        other.kill()
        with pytest.raises(JobError, match=rf"shard 1 \(unix:{tmp_path}/other.sock\) was lost at batch \d+"):
            list(phase)
