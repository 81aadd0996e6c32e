"""In the steady state no thread waits for the device, except host lanes where the schedule says so; see `lagging`.

On a device with unbounded lag, a staging ring that is too short or a value read from the device shows as a wait.
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
from bagpipe.cache.row_transfer import RowTransfer
from bagpipe.errors import JobError
from bagpipe.pipeline import devices
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.progress import Progress
from bagpipe.types.batch import Batch
from tests.gpu.jobs import SHAPES, batches_of, recorded, schema_of, smallest_cache
from tests.system.lagging import LaggingStreams
from tests.trainer.observe.small import Kept
from tests.training.small import guard_of
from trainer.observe.reporter import Reporter, TrainingFacts

#: Batches until rings, scratch memory and optimizer state exist and the first batch's ids are checked.
WARM_UP = 3


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LaggingStreams:
    streams = LaggingStreams()
    monkeypatch.setitem(devices.STREAMS, "cpu", lambda device: streams)
    return streams


def job_of(shape: str, streams: LaggingStreams, **settings: Any) -> PlainJob:
    """A job watched from its fourth batch to its second to last."""
    reporter = Reporter([Kept()])  # told every batch
    told = reporter.training(TrainingFacts(streams=streams))
    report = told.__enter__()
    assert report is not None
    num_batches = len(batches_of(shape))

    def on_batch(totals: Callable[[], Progress]) -> None:
        streams.watches = WARM_UP <= totals().steps < num_batches - 1
        report(totals)

    # A short prefetch, so that all lanes have work while they are watched.
    given = {"prefetch_depth": 2, "read_ahead": 3, "eps": 1e-3, **settings}
    return PlainJob(PlainSettings(schema=schema_of(SHAPES[shape]), **given), on_batch=on_batch)


@pytest.mark.parametrize(
    ("shape", "rows", "cached", "every"),
    [("weighted", "adam", True, 2), ("mean", "rowwise_adagrad", True, 0), ("mean", "sgd", False, 0)],
)
def test_training_waits_only_where_scheduled(
    shape: str, rows: str, cached: bool, every: int, streams: LaggingStreams, tmp_path: Path
) -> None:
    """Covers checkpoints. The checkpoint thread's waits can make a lane's wait unnecessary, so not all cases have
    them.
    """
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
    """Staged copies change neither digests nor the scores and their order."""

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
    """The sums can arrive after all lane work of a checkpoint: the checkpoint thread waits for them."""
    monkeypatch.setattr(NonfiniteGuard, "check", lambda guard: None)  # lanes always check too early
    monkeypatch.setattr(RowTransfer, "_check_finite", lambda *rows: None)  # and look at no rows
    with (
        job_of("one-hot", streams, cache_rows=smallest_cache("one-hot")) as job,
        recorded(job, tmp_path, every=2) as parts,
        pytest.raises(JobError, match=r"batch 5: the loss, or a gradient, is not finite"),
    ):
        job.train(with_a_bad_one(5))
    assert list(parts) == [2, 4]


def test_every_check_reports_a_bad_batch(streams: LaggingStreams) -> None:
    guard = guard_of(streams)
    assert not guard.is_bad(3, losses=[torch.tensor(float("nan"))])
    guard.check()  # too early
    guard.check_before(3)  # a checkpoint before the batch is good
    for _ in range(2):
        with pytest.raises(JobError, match="batch 3"):
            guard.check_before(4)
        with pytest.raises(JobError, match="batch 3"):
            guard.check()


def test_a_bad_batch_is_seen_before_its_rows_are_stored(streams: LaggingStreams) -> None:
    """The sums arrive late, but the job ends before any row of the batch reaches the store."""
    with job_of("one-hot", streams, cache_rows=smallest_cache("one-hot")) as job:
        with pytest.raises(JobError, match=r"batch 4: the loss, or a gradient, is not finite"):
            job.train(with_a_bad_one(4))
        for table in range(len(job.rows.tables)):
            rows = job.store.read(table, job.store.ids(table)).rows
            assert torch.from_numpy(rows).isfinite().all()


def test_device_waits_are_detected(streams: LaggingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [torch.Tensor.item, torch.Tensor.nonzero, bool, torch.Tensor.cpu, torch.unique]
    with job_of("one-hot", streams) as job:
        update = job.engine.cache.update

        def update_and_wait(*args: Any) -> None:
            for call in calls:
                call(torch.ones(1))
            update(*args)

        monkeypatch.setattr(job.engine.cache, "update", update_and_wait)
        job.train(batches_of("one-hot"))
    assert all("name='compute'" in line for line in streams.found)
    for name in ("item", "aten::nonzero", "__bool__", "cpu", "aten::_unique2"):
        assert any(f" {name} at" in line for line in streams.found), name


def test_a_staging_ring_that_is_too_short_is_detected(streams: LaggingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowCache.uploads
    monkeypatch.setattr(RowCache, "uploads", lambda cache, num_areas: original(cache, 1))
    with job_of("one-hot", streams) as job:
        job.train(batches_of("one-hot"))
    assert streams.found
    assert all("an event at staging.py" in line for line in streams.found)
