"""On the device: no thread synchronises in the steady state, and memory stays flat.

`torch.cuda.set_sync_debug_mode("error")` makes torch raise if a thread would wait for a stream: reading a number,
copying to or from unpinned memory, synchronising a stream. Waits for events are allowed, and the schedule's waits of
host lanes are such waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.training.progress import Progress
from tests.gpu.jobs import SHAPES, batches_of, recorded, schema_of, smallest_cache

pytestmark = pytest.mark.gpu

#: Batches until areas, scratch memory and optimizer state exist, and the first batch's ids are checked.
WARM_UP = 4


def batches_again(shape: str, times: int) -> list[Any]:
    """The shape's full-size batches, repeated."""
    whole = batches_of(shape)[:-1]
    return [dataclasses.replace(whole[n % len(whole)], index=n) for n in range(times * len(whole))]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("shape", "rows"), [("one-hot", "adagrad"), ("weighted", "adam")])
def test_no_thread_synchronises(cuda: str, shape: str, rows: str, cached: bool, tmp_path: Path) -> None:
    """Covers checkpoints."""
    batches = batches_again(shape, 4)

    def on_batch(totals: Callable[[], Progress]) -> None:
        watches = WARM_UP <= totals().steps < len(batches) - 2
        torch.cuda.set_sync_debug_mode("error" if watches else "default")

    settings = PlainSettings(
        schema=schema_of(SHAPES[shape]), device=cuda, rows=rows, dim=16, eps=1e-3,
        cache_rows=2 * smallest_cache(shape) if cached else 0,
    )  # fmt: skip
    try:
        with ExitStack() as stack:
            job = stack.enter_context(PlainJob(settings, on_batch=on_batch))
            job.engine = job.make_engine(job.make_dense(optimizer=torch.optim.Adam(job.model.parameters(), lr=0.01)))
            parts = stack.enter_context(recorded(job, tmp_path, every=5))
            result = job.train(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.progress.steps == len(batches)
    assert list(parts) == [*range(5, len(batches), 5), len(batches)]


def test_the_mode_detects_a_host_read(cuda: str) -> None:
    """The control for the test above."""
    ones = torch.ones(3, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            ones.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_is_flat(cuda: str) -> None:
    """Peak allocation, and torch's reserved memory, do not grow after the first batches."""
    batches = batches_again("one-hot", 12)
    peaks: list[int] = []
    reserved: list[int] = []

    def on_batch(totals: Callable[[], Progress]) -> None:
        if totals().steps % 20 == 0:
            peaks.append(torch.cuda.max_memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
            torch.cuda.reset_peak_memory_stats()

    settings = PlainSettings(
        schema=schema_of(SHAPES["one-hot"]), device=cuda, rows="adagrad", dim=16, eps=1e-3,
        cache_rows=2 * smallest_cache("one-hot"),
    )  # fmt: skip
    with PlainJob(settings, on_batch=on_batch) as job:
        job.train(batches)
    assert len(peaks) >= 5
    # The distance between lanes at a peak varies: one batch's area more or less, and one segment that torch requests
    # from the driver.
    assert max(peaks[2:]) <= max(peaks[:2]) + (1 << 20)
    assert max(reserved[2:]) <= max(reserved[:2]) + (20 << 20)
