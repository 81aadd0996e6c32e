"""Arguments out of range are refused when the pipeline is made, with the value."""

from __future__ import annotations

from typing import Any

import pytest

from bagpipe.errors import InputError
from bagpipe.util.environment import Installed
from tests.train_pipeline.small import pipeline


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"lookahead": 0}, "lookahead must be an integer of at least 1, got 0"),
        ({"cache_rows": -1}, "cache_rows must be an integer of at least 0, or auto, got -1"),
        ({"cache_rows": 1.5}, "cache_rows must be an integer of at least 0, or auto, got 1.5"),
        ({"cache_max_rows": 9}, "cache_max_rows 9 needs cache_rows auto, got "),
        ({"planner": "thread"}, "planner must be process, inline, unix:PATH, HOST:PORT, .* got 'thread'"),
        ({"planner": None}, "planner must be process, inline, unix:PATH, HOST:PORT, .* got 'None'"),
        ({"planner": "http://host:1"}, "planner must be process, inline, unix:PATH, .* got 'http://host:1'"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of stop, skip, got 'ignore'"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, got 0"),
        ({"row_dtype": "int8"}, "row_dtype must be one of float32, float64, float16, bfloat16, got 'int8'"),
        ({"checkpoint_every": 5}, "checkpoint_every needs checkpoint_dir"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(more: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        pipeline(**more)


def test_a_device_that_the_installed_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = Installed(torch="2.13.0+cpu", fbgemm_gpu=None, fbgemm_gpu_cpu="1.8.0", torchrec="1.9.2")
    monkeypatch.setattr("bagpipe.util.environment.read_installed", lambda: versions)
    with pytest.raises(InputError, match=r"device cuda:1 needs a CUDA build of torch, but torch 2\.13\.0\+cpu is"):
        pipeline(device="cuda:1")
