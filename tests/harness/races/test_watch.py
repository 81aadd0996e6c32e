"""The watched engine: no race, no wait for the device in the steady state, the results of a plain run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bagpipe.cache.staging import HostCopies
from bagpipe.dense.clip import Clip
from bagpipe.pipeline.devices import open_streams
from bagpipe.pipeline.stream import NullStreams, Streams
from bagpipe.testing.plain_job import PlainJob
from bagpipe.training.engine import Engine
from tests.gpu.jobs import recorded
from tests.harness.races.jobs import batches, settings
from tests.harness.races.ranks import run_two_ranks
from tests.harness.races.watch import RacesFound, Watch, watch


def check_that_nothing_waits(found: Watch) -> None:
    """Assert that no lane waits for its device and that no staging ring waits for a copy."""
    assert found.history.host_waits == []
    assert found.ring_waits == 0


@pytest.mark.parametrize("cache_rows", [24, 0])
def test_one_rank(cache_rows: int) -> None:
    """More batches than are in flight, so that memory is reused; then as many for scores."""
    with PlainJob(settings(cache_rows=cache_rows)) as plain:
        plain.train(batches(11))
        expected, scores = plain.digests(), plain.score(batches(11))
    with watch() as found, PlainJob(settings(cache_rows=cache_rows)) as job:
        job.train(batches(11))
        check_that_nothing_waits(found)
        assert job.digests() == expected
        again = job.score(batches(11))
    found.check()
    assert all(torch.equal(one, other) for one, other in zip(scores, again, strict=True))


@pytest.mark.parametrize("cache_rows", [24, 0])
def test_two_ranks(cache_rows: int) -> None:
    expected = run_two_ranks(settings(cache_rows=cache_rows), 7)
    with watch() as found:
        assert run_two_ranks(settings(cache_rows=cache_rows), 7, scores=cache_rows > 0) == expected
    check_that_nothing_waits(found)
    found.check()


def test_limits_of_row_gradients_are_race_free() -> None:
    """The norm is made in the lane of the exchange, the factor in that of the dense step; both lanes use it."""

    def limit(engine: Engine) -> None:
        engine.dense.clip = Clip(norm=0.01, scope="all")

    expected = run_two_ranks(settings(), 7, change=limit)
    with watch() as found:
        assert run_two_ranks(settings(), 7, change=limit) == expected
    check_that_nothing_waits(found)
    found.check()
    with watch() as found, PlainJob(settings()) as job:
        limit(job.engine)
        job.train(batches(11))
        check_that_nothing_waits(found)
    found.check()


def test_checkpoints_during_training_are_race_free(tmp_path: Path) -> None:
    """The lane that changes a row copies it first; a separate thread writes the checkpoint."""
    with PlainJob(settings()) as plain:
        plain.train(batches(10))
        expected = plain.digests()
    with watch() as found, PlainJob(settings()) as job, recorded(job, tmp_path, every=4) as parts:
        job.train(batches(10))
        check_that_nothing_waits(found)
        assert job.digests() == expected
    found.check()
    assert list(parts) == [4, 8, 10]


def _beside_the_lane(copies: HostCopies, streams: Streams, tensors: Mapping[str, Tensor]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        _copy(copies, streams, tensors)


def _without_an_event(copies: HostCopies, streams: Streams, tensors: Mapping[str, Tensor]) -> None:
    _copy(copies, streams, tensors)
    copies._copied = None


_copy = HostCopies.__init__


@pytest.mark.parametrize(
    ("copy", "race"),
    [(_beside_the_lane, ("aten::add_", "aten::copy_")), (_without_an_event, ("aten::copy_", "the host"))],
)
def test_a_dense_part_that_is_copied_or_written_too_early(
    copy: Callable[..., None], race: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that runs next to the steps that change the dense part, and a file write before the copy."""
    monkeypatch.setattr(HostCopies, "__init__", copy)
    with watch() as found, PlainJob(settings()) as job, recorded(job, tmp_path, every=4):
        job.train(batches(6))
    assert race in {(race.first.operator, race.second.operator) for race in found.races}


def test_a_race_reports_both_accesses() -> None:
    with watch() as found:
        value = torch.zeros(2, 3, device="cpu")
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            value.add_(1)
    with pytest.raises(RacesFound) as caught:
        found.check()
    words = str(caught.value)
    assert "1 races, of 1 pairs of actions" in words
    assert "default stream: aten::zeros writes [2, 3]" in words
    assert "a stream: aten::add_ reads [2, 3]" in words or "a stream: aten::add_ writes [2, 3]" in words
    line = test_a_race_reports_both_accesses.__code__.co_firstlineno + 2
    assert f"tests/harness/races/test_watch.py:{line} " in words


def test_nothing_is_patched_outside_the_watch() -> None:
    before = torch.cuda.Stream, torch.cuda.Event
    with watch():
        assert not isinstance(open_streams("cpu"), NullStreams)
    assert isinstance(open_streams("cpu"), NullStreams)
    assert (torch.cuda.Stream, torch.cuda.Event) == before
