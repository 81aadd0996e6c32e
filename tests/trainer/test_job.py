from __future__ import annotations

import dataclasses

import pytest

from bagpipe.config import Config, PipelineConfig, RunConfig
from bagpipe.errors import InputError
from trainer.job import check_supported


def test_settings_of_later_versions_are_refused_not_ignored() -> None:
    check_supported(Config())
    with pytest.raises(InputError, match=r"pipeline.schedule"):
        check_supported(Config(pipeline=PipelineConfig(schedule="1f1b")))
    with pytest.raises(InputError, match=r"cache.dtype"):
        check_supported(
            Config(run=RunConfig(dtype="float64"), cache=dataclasses.replace(Config().cache, dtype="float32"))
        )
