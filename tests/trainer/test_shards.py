"""A dense part is divided among at least two ranks."""

from __future__ import annotations

import pytest

from bagpipe.config.dense_section import DenseConfig
from bagpipe.errors import InputError
from trainer.shards import check_shards


def test_one_rank_is_refused() -> None:
    check_shards(DenseConfig(), 1)
    check_shards(DenseConfig(shard="optimizer"), 2)
    with pytest.raises(InputError, match=r"^dense.shard optimizer needs at least 2 ranks, got 1$"):
        check_shards(DenseConfig(shard="optimizer"), 1)
