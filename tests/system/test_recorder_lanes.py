"""Several lanes reach a checkpoint: it is made once, and its counters include exactly the batches before it."""

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
    """Two ranks, so that two lanes update rows. No row leaves the cache, so no lane waits for an update."""
    return recorded(change(clicks(), cache__rows=10_000), tmp_path, every=2, world_size=2)


def rank_of(engine: Engine) -> int:
    assert engine.peers is not None
    return engine.peers.rank


def test_a_late_lane_makes_no_second_checkpoint(job: Recorded) -> None:
    """The late lane arrives when the rank's whole part is already written."""
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
    """The second lane waits until the first has read the counters: its next update belongs to the next batch."""
    held = []

    class Watched:
        """A run that records whether the lock is held while its counters are read."""

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
