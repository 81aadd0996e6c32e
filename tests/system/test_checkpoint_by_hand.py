"""Checkpoints between two batches, asked for by the caller: a job killed after one resumes from it and ends alike."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.config.sections import Config
from bagpipe.errors import JobError
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.training.engine import Engine
from bagpipe.training.user_state import UserState, saved_state
from tests.effort import some_of
from tests.system.jobs import change, largest_batch
from tests.system.recording import Crash, Recorded, RecordedOutcome, recorded

MakeConfig = Callable[..., Config]

#: Batches of the click log.
NUM_BATCHES = 26


def uninterrupted(config: Config, root: Path, *, world_size: int = 1) -> RecordedOutcome:
    return recorded(config, root, every=1_000, world_size=world_size).run()


def assert_alike(end: RecordedOutcome, whole: RecordedOutcome) -> None:
    assert end.digests == whole.digests
    assert end.totals == whole.totals


def steps_of(job: Recorded) -> list[int]:
    return sorted(step for _, step in CheckpointFolder(job.root).positions())


def newest(job: Recorded) -> Checkpoint:
    found = CheckpointFolder(job.root).newest(job.on_broken)
    assert found is not None
    return found


@pytest.mark.parametrize(("every", "rows"), some_of([*itertools.product([0, 4], [0, 10_000, None])], {1, 3, 5}))
def test_a_job_killed_after_a_checkpoint_by_hand(
    clicks: MakeConfig, tmp_path: Path, rows: int | None, every: int
) -> None:
    """No cache, a cache for all rows, and a full cache; with every = 4 a checkpoint is due at the same step."""
    config = clicks(optimizer="adam")
    rows = largest_batch(config) + 7 if rows is None else rows
    config = change(config, cache__rows=rows, optim__dense="adam")
    job = recorded(config, tmp_path, every=every, by_hand={8})
    with pytest.raises(Crash):
        job.run(crash_at=8)
    assert steps_of(job)[-1] == 8
    end = job.run()
    assert end.first_batch == 8
    assert_alike(end, uninterrupted(config, tmp_path))


@pytest.mark.parametrize("seed", some_of(range(6), {0, 3}))
def test_checkpoints_by_hand_and_others(clicks: MakeConfig, tmp_path: Path, seed: int) -> None:
    """Before and after each other, in jobs that are killed and in jobs that go on."""
    rng = random.Random(seed)
    config = clicks(*rng.choice([("sum", "dlrm"), ("ragged", "wide-deep"), ("mixed", "deepfm")]), "adagrad")
    config = change(
        config,
        cache__rows=rng.choice([0, largest_batch(config) + rng.randrange(60), 10_000]),
        cache__prefetch_depth=rng.randint(1, 4),
        oracle__lookahead=rng.randint(1, 12),
    )
    by_hand = set(rng.sample(range(NUM_BATCHES + 1), rng.randint(1, 8)))
    job = recorded(config, tmp_path, every=rng.choice([0, 1, 3, 5]), by_hand=by_hand)
    for crash_at in rng.sample(range(1, 9), rng.randint(0, 3)):
        with pytest.raises(Crash):
            job.run(crash_at=crash_at)
    end = job.run()
    assert_alike(end, uninterrupted(config, tmp_path))
    assert {step for step in by_hand if step > end.first_batch} <= set(steps_of(job))
    assert steps_of(job)[-1] == NUM_BATCHES


@pytest.mark.parametrize(("world_size", "rows"), some_of([(2, None), (3, 0)], {0}))
def test_ranks(clicks: MakeConfig, tmp_path: Path, world_size: int, rows: int | None) -> None:
    config = clicks(optimizer="adam")
    rows = largest_batch(config) if rows is None else rows
    config = change(config, cache__rows=rows, optim__dense="adam")
    job = recorded(config, tmp_path, every=5, world_size=world_size, by_hand={4, 11, 12})
    for crash_at in (6, 9):
        with pytest.raises(Crash):
            job.run(crash_at=crash_at, crash_rank=world_size - 1)
    end = job.run()
    assert end.first_batch >= 11
    assert_alike(end, uninterrupted(config, tmp_path, world_size=world_size))


def test_the_store_has_all_rows(clicks: MakeConfig, tmp_path: Path) -> None:
    """Rows stay in the cache; the checkpoint names none that the store lacks."""
    job = recorded(change(clicks(), cache__rows=10_000), tmp_path, every=0, by_hand={9, 15})
    engines: list[Engine] = []
    job.prepare = engines.append
    with pytest.raises(Crash):
        job.run(crash_at=15)
    slots = engines[0].cache.slots
    assert (slots.slot_id >= 0).any()
    assert not slots.dirty.any()
    assert steps_of(job) == [0, 9, 15]
    assert [part.dirty for part in newest(job).manifest.parts] == [None]


def test_no_checkpoint_is_made_twice(clicks: MakeConfig, tmp_path: Path) -> None:
    """At the start, twice at one step, and at the end."""
    job = recorded(change(clicks(), cache__rows=200), tmp_path, every=13, by_hand={0, 13, NUM_BATCHES})
    made: list[int] = []
    job.on_folder = made.append
    first = job.run()
    assert steps_of(job) == [0, 13, NUM_BATCHES]
    made.clear()
    again = job.run()
    assert not made
    assert again.first_batch == NUM_BATCHES
    assert_alike(again, first)


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_runs_of_one_job(clicks: MakeConfig, tmp_path: Path, world_size: int) -> None:
    """A run ends with a checkpoint; the next one begins where one is due, and makes no second."""
    config = change(clicks(optimizer="adam"), cache__rows=200, optim__dense="adam")
    job = recorded(config, tmp_path, every=5, world_size=world_size, run_ends=(8, 15), by_hand={8, 12})
    with pytest.raises(Crash):
        job.run(crash_at=18)
    assert steps_of(job)[:6] == [0, 5, 8, 10, 12, 15]
    end = job.run()
    assert end.first_batch >= 15
    assert_alike(end, uninterrupted(config, tmp_path, world_size=world_size))


def test_logs_of_jobs_without_files(clicks: MakeConfig, tmp_path: Path) -> None:
    job = recorded(change(clicks(), cache__rows=200), tmp_path, every=10, rows_only=True, by_hand={4, 10})
    assert job.run().digests == uninterrupted(change(clicks(), cache__rows=200), tmp_path).digests
    with job.stores[0].ledger() as ledger:
        logs = [log for state in ledger.state() for log in state.logs]
    # Closed at 4, 10, 20 and 26.
    assert {log.epoch for log in logs} == {1, 2, 3, 4, 5}


def test_a_full_disk_ends_the_job(clicks: MakeConfig, tmp_path: Path) -> None:
    config = change(clicks(), cache__rows=200)
    job = recorded(config, tmp_path, every=5, by_hand={9})

    def refuse(step: int) -> None:
        if step == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoints")

    job.on_folder = refuse
    with pytest.raises(JobError, match=r"^a checkpoint cannot be written: No space left on device \(checkpoints\)"):
        job.run()
    job.on_folder = lambda step: None
    end = job.run()
    assert end.first_batch == 5
    assert_alike(end, uninterrupted(config, tmp_path))


class Loader:
    """Batches of one rank, with a state like that of a data loader: position, and bytes drawn at random."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0
        self.noise = random.Random(rank)
        self.at: dict[int, Mapping[str, Any]] = {}

    def state(self) -> Mapping[str, Any]:
        return {"rank": self.rank, "position": self.position, "noise": repr(self.noise.getstate()).encode()}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.position = state["position"]
        self.noise.setstate(eval(state["noise"]))

    def over(self, batches: Iterator[RankBatch], first_batch: int) -> Iterator[RankBatch]:
        """The lanes read ahead, so the state of a batch is kept until the batch is trained."""
        self.at[first_batch] = self.state()
        for number, batch in enumerate(batches, start=first_batch + 1):
            self.position += 1
            self.noise.random()
            self.at[number] = self.state()
            yield batch


@pytest.mark.parametrize(("world_size", "by_hand"), some_of([*itertools.product([1, 2], [(), (9,)])], {0, 3}))
def test_each_rank_resumes_from_its_own_state(
    clicks: MakeConfig, tmp_path: Path, by_hand: tuple[int, ...], world_size: int
) -> None:
    config = change(clicks(), cache__rows=10_000)
    job = recorded(config, tmp_path, every=4, world_size=world_size, by_hand=by_hand)
    loaders: dict[int, Loader] = {}
    begun: dict[int, Mapping[str, Any]] = {}

    def make_parts(rank: int, carried: Mapping[str, Any]) -> tuple[UserState]:
        loaders[rank] = loader = Loader(rank)
        state = saved_state(carried)
        if state is not None:
            loader.restore(state)
        begun[rank] = loader.state()
        return (UserState(lambda step: loader.at[step]),)

    job.more_parts = make_parts
    job.change_batches = lambda rank, batches: loaders[rank].over(batches, begun[rank]["position"])
    with pytest.raises(Crash):
        job.run(crash_at=14)
    end = job.run()
    assert end.first_batch >= max(by_hand, default=0)
    assert_alike(end, uninterrupted(config, tmp_path, world_size=world_size))
    for rank, loader in loaders.items():
        assert begun[rank]["position"] == end.first_batch
        whole = Loader(rank)
        states = whole.over(iter([None] * NUM_BATCHES), 0)  # type: ignore[list-item]
        assert len(list(states)) == NUM_BATCHES
        assert loader.state() == whole.state()
        assert begun[rank] == whole.at[end.first_batch]
