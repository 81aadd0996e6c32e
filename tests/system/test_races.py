"""Staged jobs have no stream races (`tests.harness.races`): activations, gradients and weights of many lanes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagpipe.config.sections import Config
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
