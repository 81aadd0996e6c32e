from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest

from bagpipe.config import CacheConfig, Config, DataConfig, PipelineConfig, RunConfig
from bagpipe.errors import CapacityError, InputError
from trainer.job import check_supported, run_job
from trainer.ranks import Ranks


def test_settings_of_later_versions_are_refused_not_ignored() -> None:
    check_supported(Config())
    with pytest.raises(InputError, match=r"pipeline.schedule"):
        check_supported(Config(pipeline=PipelineConfig(schedule="1f1b")))
    with pytest.raises(InputError, match=r"cache.dtype"):
        check_supported(
            Config(run=RunConfig(dtype="float64"), cache=dataclasses.replace(Config().cache, dtype="float32"))
        )


class _Told(Ranks):
    """One rank that notes what is still there when it tells of its error."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.told: list[tuple[str, list[str]]] = []

    def report(self, error: BaseException) -> None:
        self.told.append((type(error).__name__, [path.name for path in self._folder.glob("*.sock")]))


@pytest.mark.redis
@pytest.mark.multiproc
def test_others_are_told_before_what_they_use_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _Told(tmp_path)
    monkeypatch.setattr("trainer.job.open_ranks", lambda *_, **__: nullcontext(ranks))
    config = Config(
        data=DataConfig(limit=200, workers=0),
        cache=CacheConfig(rows=3),
        run=RunConfig(dir=str(tmp_path)),
    )
    with pytest.raises(CapacityError):
        run_job(config)
    assert ranks.told == [("CapacityError", ["store.sock"])]
    assert list(tmp_path.glob("*.sock")) == []
