"""No thread waits for the device in the steady state, but the host lanes for what the schedule says; see `lagging`.

On a device that lags infinitely a ring of staging areas that is too short, or a number read from the device, is a wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from bagpipe.cache.row_cache import RowCache
from bagpipe.errors import JobError
from bagpipe.pipeline import devices
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.progress import Progress
from bagpipe.types.batch import Batch
from tests.gpu.jobs import SHAPES, batches_of, recorded, schema_of, smallest_cache
from tests.system.lagging import LaggingStreams
from tests.training.small import guard_of
from trainer.progress import ProgressReporter

#: Batches until rings, scratch memory and the optimizer's state are there, and the first batch's ids are checked.
WARM_UP = 3


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LaggingStreams:
    streams = LaggingStreams()
    monkeypatch.setitem(devices.STREAMS, "cpu", lambda device: streams)
    return streams


def job_of(shape: str, streams: LaggingStreams, **settings: Any) -> PlainJob:
    """A job that is watched from its fourth batch to its last but one."""
    reporter = ProgressReporter("", streams=streams)
    reporter._last_s = float("-inf")  # shows every batch: the interval is for people
    num_batches = len(batches_of(shape))

    def on_batch(totals: Callable[[], Progress]) -> None:
        streams.watches = WARM_UP <= totals().steps < num_batches - 1
        reporter._last_s = float("-inf")
        reporter(totals)

    # Not far ahead, so that all lanes have work while they are watched.
    given = {"prefetch_depth": 2, "read_ahead": 3, "eps": 1e-3, **settings}
    return PlainJob(PlainSettings(schema=schema_of(SHAPES[shape]), **given), on_batch=on_batch)


@pytest.mark.parametrize(
    ("shape", "rows", "cached", "every"),
    [("weighted", "adam", True, 2), ("mean", "rowwise_adagrad", True, 0), ("mean", "sgd", False, 0)],
)
def test_training_waits_where_the_schedule_says_and_nowhere_else(
    shape: str, rows: str, cached: bool, every: int, streams: LaggingStreams, tmp_path: Path
) -> None:
    """Checkpoints included. Who writes them waits, and after that a lane need not: so not in all cases."""
    settings = {"rows": rows, "cache_rows": smallest_cache(shape) if cached else 0}
    with ExitStack() as stack:
        job = stack.enter_context(job_of(shape, streams, **settings))
        optimizer = torch.optim.Adam(job.model.parameters(), lr=0.01)
        job.engine = job.make_engine(job.make_dense(optimizer=optimizer))
        parts = stack.enter_context(recorded(job, tmp_path, every=every))
        streams._allowed = lambda: [state["step"] for state in optimizer.state.values()]
        result = job.train(batches_of(shape))
        job.score(batches_of(shape))
    assert result.progress.steps == len(batches_of(shape))
    assert list(parts) == ([2, 4, 6, 8, 10] if every else [10])
    assert streams.found == []


def test_staging_changes_no_bit(streams: LaggingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it lose a score, or change their order."""

    def outcome() -> tuple[tuple[str, str], list[float], list[float]]:
        with job_of("multi-hot", streams, rows="adagrad", cache_rows=smallest_cache("multi-hot")) as job:
            job.train(batches_of("multi-hot"))
            logits, labels = job.score(batches_of("multi-hot"))
            return job.digests(), logits.tolist(), labels.tolist()

    staged = outcome()
    assert streams.done
    monkeypatch.undo()
    assert staged == outcome()


def with_a_bad_one(number: int) -> list[Batch]:
    batches = list(batches_of("one-hot"))
    dense = batches[number].dense.copy()
    dense[0, 0] = float("inf")
    batches[number] = dataclasses.replace(batches[number], dense=dense)
    return batches


def test_a_bad_batch_is_in_no_checkpoint(
    streams: LaggingStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums may be later than all that the lanes do for a checkpoint: whoever writes it waits for them."""
    monkeypatch.setattr(NonfiniteGuard, "check", lambda guard: None)  # lanes always look too early
    with (
        job_of("one-hot", streams, cache_rows=smallest_cache("one-hot")) as job,
        recorded(job, tmp_path, every=2) as parts,
        pytest.raises(JobError, match=r"batch 5: the loss, or a gradient, is not finite"),
    ):
        job.train(with_a_bad_one(5))
    assert list(parts) == [2, 4]


def test_a_bad_batch_is_told_to_all_who_ask(streams: LaggingStreams) -> None:
    guard = guard_of(streams)
    assert not guard.is_bad(3, loss=torch.tensor(float("nan")))
    guard.check()  # too early
    guard.check_before(3)  # what a checkpoint before it holds is good
    for _ in range(2):
        with pytest.raises(JobError, match="batch 3"):
            guard.check_before(4)
        with pytest.raises(JobError, match="batch 3"):
            guard.check()


def test_a_bad_batch_is_seen_before_its_rows_are_stored(streams: LaggingStreams) -> None:
    """Its sums come late: the job ends all the same, and nothing of the batch has reached the store."""
    with job_of("one-hot", streams, cache_rows=smallest_cache("one-hot")) as job:
        with pytest.raises(JobError, match=r"batch 4: the loss, or a gradient, is not finite"):
            job.train(with_a_bad_one(4))
        for table in range(len(job.rows.tables)):
            rows = job.store.read(table, job.store.ids(table)).rows
            assert torch.from_numpy(rows).isfinite().all()


def test_what_would_wait_is_seen(streams: LaggingStreams) -> None:
    calls = [torch.Tensor.item, torch.Tensor.nonzero, bool, torch.Tensor.cpu, torch.unique]
    with job_of("one-hot", streams) as job:
        update = job.engine.cache.update

        def spoilt(*args: Any) -> None:
            for call in calls:
                call(torch.ones(1))
            update(*args)

        job.engine.cache.update = spoilt  # type: ignore[method-assign]
        job.train(batches_of("one-hot"))
    assert all("name='compute'" in line for line in streams.found)
    for name in ("item", "aten::nonzero", "__bool__", "cpu", "aten::_unique2"):
        assert any(f" {name} at" in line for line in streams.found), name


def test_a_ring_that_is_too_short_is_seen(streams: LaggingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowCache.uploads
    monkeypatch.setattr(RowCache, "uploads", lambda cache, num_areas: original(cache, 1))
    with job_of("one-hot", streams) as job:
        job.train(batches_of("one-hot"))
    assert streams.found
    assert all("an event at staging.py" in line for line in streams.found)
