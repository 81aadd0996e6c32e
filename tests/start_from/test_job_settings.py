"""What the settings of a job say about its state."""

from __future__ import annotations

from typing import Any

import pytest

from bagpipe.config.sections import Config, DataConfig, OptimConfig, PipelineConfig
from bagpipe.start_from.job_settings import counts_uses, expires, follows_rows, is_staged, optimizer_name
from trainer.settings import common_settings


def test_the_optimizer_of_both_programs() -> None:
    trained = common_settings(Config(optim=OptimConfig(dense="adam")))
    assert [optimizer_name(settings) for settings in (trained, {"optimizer": "AdamW"}, {})] == ["adam", "adamw", ""]


@pytest.mark.parametrize(
    ("data", "counts", "ends"),
    [
        (DataConfig(), False, False),
        (DataConfig(min_uses=2), True, False),
        (DataConfig(min_uses_by_table=("a=3",)), True, False),
        (DataConfig(expire_after=2.5), False, True),
        (DataConfig(expire_after_by_table=("a=3",)), False, True),
    ],
)
def test_jobs_that_need_the_names_of_their_rows(data: DataConfig, counts: bool, ends: bool) -> None:
    settings = common_settings(Config(data=data))
    assert (counts_uses(settings), expires(settings), follows_rows(settings)) == (counts, ends, counts or ends)
    assert not follows_rows({})  # of a program of one's own


@pytest.mark.parametrize("values", [{}, {"schedule": "1f1b"}, {"microbatches": 2}])
def test_stages_are_those_of_the_configuration(values: dict[str, Any]) -> None:
    pipeline = PipelineConfig(**values)
    assert is_staged(common_settings(Config(pipeline=pipeline))) == pipeline.is_staged
