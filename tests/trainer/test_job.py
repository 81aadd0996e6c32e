from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagpipe.config.sections import CacheConfig, Config, DataConfig, RunConfig, StoreConfig
from bagpipe.errors import CapacityError
from bagpipe.jobs.ranks import Ranks
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.split.staged_model import StagedModel, StageModule, StageValue
from trainer.job import _DigestProgress, run_job
from trainer.stages import StagedJob, has_losses


@pytest.mark.parametrize(
    ("schedule", "heads", "world_size", "ranks"),
    [
        ("1f1b", {1: 1}, 1, {0}),
        ("1f1b", {1: 1}, 4, {1, 3}),
        ("1f1b", {0: 1, 1: 1}, 2, set()),  # each rank computes one of two losses
        ("chimera", {1: 2}, 2, {0, 1}),
    ],
)
def test_which_ranks_have_losses_to_show(
    schedule: str, heads: dict[int, int], world_size: int, ranks: set[int]
) -> None:
    hidden = StageValue(name="hidden", producer=0, consumers=(1,), shape=(2,), dtype=torch.float32, wants_grad=True)
    stages = tuple(
        StageModule(
            name="",
            module=nn.Identity(),
            inputs=(0,) * stage,
            outputs=(0,) * (1 - stage),
            heads=tuple((n, n) for n in range(heads.get(stage, 0))),
        )
        for stage in range(2)
    )
    staged = StagedModel(model=nn.Identity(), embedding=nn.Identity(), stages=stages, values=(hidden,))
    step = step_program(
        staged.graph(2),
        [(0, True)],
        DENSE_SCHEDULES[schedule],
        num_processes=min(world_size, 2),
        replicas=max(1, world_size // 2),
    )
    job = StagedJob(staged=staged, mesh=Mesh(step=step, world_size=world_size))
    assert {rank for rank in range(world_size) if has_losses(job, rank)} == ranks
    assert has_losses(None, 0)


class _ReportingRanks(Ranks):
    """A rank that records its reported errors and the files that exist at that time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.reported: list[tuple[str, list[str]]] = []

    @contextmanager
    def reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.reported.append((type(error).__name__, [path.name for path in self._folder.glob("*.sock")]))
            raise


@pytest.mark.redis
@pytest.mark.multiproc
def test_errors_are_reported_before_services_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ReportingRanks(tmp_path)
    monkeypatch.setattr("trainer.job.open_ranks", lambda *_, **__: nullcontext(ranks))
    config = Config(
        data=DataConfig(limit=200, workers=0),
        cache=CacheConfig(rows=3),
        run=RunConfig(dir=str(tmp_path)),
    )
    with pytest.raises(CapacityError):
        run_job(config)
    assert ranks.reported == [("CapacityError", ["store.sock"])]
    assert list(tmp_path.glob("*.sock")) == []


class _GatheringRanks(Ranks):
    """A rank that records, at each exchange with the others, whether it is connected to a cacher."""

    def __init__(self) -> None:
        super().__init__()
        self.connected: list[bool] = []

    def gather(self, value: Any) -> list[Any]:
        self.connected.append(any(thread.name == "cacher-client" for thread in threading.enumerate()))
        return super().gather(value)


@pytest.mark.multiproc
def test_a_rank_leaves_the_cacher_before_the_ranks_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So rank 0 stops its cacher when no rank is connected."""
    ranks = _GatheringRanks()
    monkeypatch.setattr("trainer.job.open_ranks", lambda *_, **__: nullcontext(ranks))
    run_job(Config(data=DataConfig(limit=200, workers=0), store=StoreConfig(url="memory://")))
    assert ranks.connected[-2:] == [True, False]


def test_a_long_digest_says_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted when the first note is due, and once."""
    counts = iter([30])
    progress = _DigestProgress(lambda: next(counts))
    progress(10)
    monkeypatch.setattr("bagpipe.util.program.NOTE_INTERVAL_S", 0.0)
    progress(10)
    progress(10)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" digested")[0] for line in told] == ["note: 20 of 30 rows", "note: 30 of 30 rows"]
