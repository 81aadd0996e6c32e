"""Keys of the admission of rows that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from bagpipe.config.cacher_section import CacherConfig
from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config, DataConfig, OptimConfig, OracleConfig, StoreConfig
from bagpipe.errors import InputError

MANY = {"min_uses": 3}


def test_consistent_keys_pass() -> None:
    data = DataConfig(min_uses_by_table=("a=3", "b=1"), use_counts="sketch", sketch_cells=64, default_row="zero")
    check_config(Config(data=data, optim=OptimConfig(rows_by_table=("b=frozen",)), oracle=OracleConfig(horizon="log")))


@pytest.mark.parametrize(
    ("values", "sections", "line"),
    [
        (
            {"min_uses_by_table": ("a=0",)},
            {},
            "data.min_uses_by_table must be TABLE=USES, the uses from 1 to 2**31 - 1, got 'a=0'",
        ),
        ({"min_uses_by_table": ("a=3", "a=4")}, {}, "data.min_uses_by_table names table 'a' more than once"),
        (
            MANY,
            {"store": StoreConfig(existing="rows-only")},
            "data.min_uses needs a job that begins without rows, got store.existing rows-only: nobody counted the uses "
            "of the rows there",
        ),
        (
            MANY,
            {"optim": OptimConfig(rows_by_table=("a=frozen",))},
            "data.min_uses must be 1 for table 'a', whose rows optim.rows_by_table freezes: none of them is created",
        ),
        (
            {**MANY, "path": "here", "format": "parquet", "follow": "marker", "eval_fraction": 0.0},
            {},
            "data.min_uses is not possible with a stream: a resumed job counts from the first batch on, which can be "
            "gone",
        ),
        (
            MANY,
            {"cacher": CacherConfig(shards=("2",))},
            "data.min_uses is not possible with cacher.shards: one process counts the uses of rows",
        ),
        (
            {"default_row": "zero"},
            {},
            "data.default_row zero needs data.min_uses above 1, for all tables or one, got 1",
        ),
        ({**MANY, "sketch_cells": 64}, {}, "data.sketch_cells 64 needs data.use_counts sketch, got exact"),
    ],
)
def test_keys_that_do_not_fit_are_refused(values: dict[str, Any], sections: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config(Config(data=DataConfig(**values), **sections))
    assert str(caught.value) == line
