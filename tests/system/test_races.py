"""Staged jobs have no stream races (`tests.harness.races`): activations, gradients and weights of many lanes.

Nor have the rows that two lanes keep for checkpoints.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from bagpipe.cache.staging import copy_to_host
from bagpipe.config.sections import Config
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.earlier_rows import KeptRows
from bagpipe.training.engine import Engine
from bagpipe.training.part import Hook, LoopPart
from tests.harness.races.jobs import settings
from tests.harness.races.ranks import run_two_ranks
from tests.harness.races.watch import watch
from tests.system import jobs
from tests.system.jobs import change, run_job
from tests.system.rank_threads import run_ranks


def staged(clicks: Callable[..., Config], schedule: str) -> Config:
    values = {"pipeline__schedule": schedule, "pipeline__stages": 2, "pipeline__microbatches": 2}
    return change(clicks(limit=60), cache__rows=60, **values)


def test_one_process(clicks: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipes, whose gradients a separate lane sums."""
    # `_Losses` reads the loss of every batch, so the compute lane waits for the device, which hides races.
    monkeypatch.setattr(jobs._Losses, "__call__", lambda losses, totals: None)
    with watch() as found:
        run_job(staged(clicks, "chimera"))
    found.check()


def test_two_processes(clicks: Callable[..., Config]) -> None:
    with watch() as found:
        run_ranks(staged(clicks, "1f1b"), 2)
    found.check()


class CopyOfKept(LoopPart):
    """Copies what both lanes have kept to the host, in the lane that is done later, as checkpoints do."""

    def __init__(self, engine: Engine, kept: KeptRows) -> None:
        self._engine = engine
        self._kept = kept
        self._done: Counter[int] = Counter()
        self._lock = threading.Lock()

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.UPDATE, when="after", call=self._copy)

    def _copy(self, key: OpKey, b: int) -> None:
        with self._lock:
            self._done[b] += 1
            is_last = self._done[b] == 2
        if is_last:
            copy_to_host(self._engine.cache.streams, self._kept.row_tensors())


def test_kept_rows() -> None:
    def keep(engine: Engine) -> None:
        kept = KeptRows(engine.cache, 0)
        engine.parts = (kept, CopyOfKept(engine, kept))

    with watch() as found:
        run_two_ranks(settings(), 10, change=keep)
    found.check()
