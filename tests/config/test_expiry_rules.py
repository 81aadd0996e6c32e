"""Keys of the expiry of rows that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from bagpipe.config.cacher_section import CacherConfig
from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config, DataConfig, StoreConfig
from bagpipe.errors import InputError

OLD = {"expire_after": 1e6}


def test_consistent_keys_pass() -> None:
    data = DataConfig(expire_after_by_table=("a=3.5", "b=0"), expire_unit="steps", expire_every=10)
    check_config(Config(data=data))
    assert data.expires
    assert not DataConfig(expire_after_by_table=("a=0", "b=-0.0", "c=0e1")).expires


@pytest.mark.parametrize(
    ("values", "sections", "line"),
    [
        (
            {"expire_after_by_table": ("a",)},
            {},
            "data.expire_after_by_table must be TABLE=NUMBER, the number at least 0 (0: never), got 'a'",
        ),
        (
            {"expire_after_by_table": ("a=inf",)},
            {},
            "data.expire_after_by_table must be TABLE=NUMBER, the number at least 0 (0: never), got 'a=inf'",
        ),
        ({"expire_after_by_table": ("a=3", "a=4")}, {}, "data.expire_after_by_table names table 'a' more than once"),
        (
            {"expire_unit": "steps"},
            {},
            "data.expire_unit steps needs data.expire_after above 0, for all tables or one, got 0",
        ),
        ({"expire_every": 7}, {}, "data.expire_every 7 needs data.expire_after above 0, for all tables or one, got 0"),
        (
            OLD,
            {"store": StoreConfig(existing="rows-only")},
            "data.expire_after needs a job that begins without rows, got store.existing rows-only: nobody followed the "
            "uses of the rows there",
        ),
        (
            {**OLD, "path": "here", "format": "parquet", "follow": "marker", "eval_fraction": 0.0},
            {},
            "data.expire_after is not possible with a stream: a resumed job follows rows from the first batch on, "
            "which can be gone",
        ),
        (
            OLD,
            {"cacher": CacherConfig(shards=("2",))},
            "data.expire_after is not possible with cacher.shards: one process follows the uses of rows",
        ),
        (
            {**OLD, "min_uses": 3, "use_counts": "sketch"},
            {},
            "data.expire_after is not possible with data.use_counts sketch, which cannot forget the uses of a row: use "
            "exact",
        ),
    ],
)
def test_keys_that_do_not_fit(values: dict[str, Any], sections: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        check_config(Config(data=DataConfig(**values), **sections))
    assert str(caught.value) == line
