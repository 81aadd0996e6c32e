"""Lanes that come to a checkpoint together: whichever is first, it is made once, and counts what came before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.sections import Config
from bagpipe.training.engine import Engine
from bagpipe.training.part import LoopRun
from tests.system.jobs import change
from tests.system.recording import Recorded, recorded

MakeConfig = Callable[..., Config]


@pytest.fixture
def job(clicks: MakeConfig, tmp_path: Path) -> Recorded:
    """Of two ranks, so that two lanes update rows; nothing leaves the cache, so nothing waits for an update."""
    return recorded(change(clicks(), cache__rows=10_000), tmp_path, every=2, world_size=2)


def rank_of(engine: Engine) -> int:
    assert engine.peers is not None
    return engine.peers.rank


def test_a_lane_that_is_late_makes_no_second_one(job: Recorded) -> None:
    """It comes to the moment when all of the rank's part is written."""
    late = []

    def prepare(engine: Engine) -> None:
        recorder = engine.recorder
        assert recorder is not None
        before_update = recorder.before_update

        def wait_first(b: int, *, drains: bool = True) -> None:
            if b == 4 and not drains and rank_of(engine) == 1:
                recorder._wait_for(lambda: recorder._find(4) is None)
                late.append(b)
            before_update(b, drains=drains)

        recorder.before_update = wait_first  # type: ignore[method-assign]

    job.prepare = prepare
    job.run()
    assert late == [4]
    steps = [step for _, step in CheckpointFolder(job.root).positions()]
    assert steps == [*range(26, -1, -2)]


def test_no_row_changes_before_the_examples_are_counted(job: Recorded) -> None:
    """The lane that is second waits until the first has counted: what it does next is of the batch after."""
    held = []

    class Watched:
        """The run, with a look at the lock while its counters are read."""

        def __init__(self, run: LoopRun, engine: Engine) -> None:
            self._run, self._engine = run, engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._run, name)

        def counters(self) -> Mapping[str, Any]:
            lock = self._engine.cache.snapshot.lock
            other = threading.Thread(target=lambda: held.append(not lock.acquire(blocking=False)))
            other.start()
            other.join()
            return self._run.counters()

    def prepare(engine: Engine) -> None:
        recorder = engine.recorder
        assert recorder is not None
        start = recorder.start
        recorder.start = lambda run, check: start(Watched(run, engine), check)  # type: ignore[arg-type, assignment, method-assign]

    job.prepare = prepare
    job.run()
    assert held
    assert all(held)
