from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from tests.forecast.jobs import job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks: expected at least 1, got 0"),
        ({"ranks": 2000}, "ranks: expected at most the 1024 examples of a batch, got 2000"),
        ({"batch_examples": 512}, "batch_examples: expected 1024, as the rows were counted, got 512"),
        ({"dim": 0}, "dim: expected at least 1, got 0"),
    ],
)
def test_impossible_jobs(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**changes)
