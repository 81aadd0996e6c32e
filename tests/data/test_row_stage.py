"""Admission and expiry of rows in the batches of a loader."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.types.batch import Batch
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID, DataSchema, Feature, Table
from cacher.planning import PlannedData
from data.formats import open_source
from data.loader import open_loader
from data.row_stage import admitted_schema, row_stage
from tests.oracle.batches import make_batch
from tests.system.clicks import write_clicks, write_schemas


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("clicks")
    path, schemas = write_clicks(folder / "clicks.parquet"), write_schemas(folder)
    return DataConfig(
        format="parquet", path=str(path), schema=str(Path(schemas["sum"])), batch_size=12, eval_fraction=0.2, workers=0
    )


def with_uses(data: DataConfig, **values: Any) -> DataConfig:
    return DataConfig(**{**vars(data), "min_uses": 3, **values})


def read(data: DataConfig, phase: Any = "train", state: Any = None) -> list[Batch]:
    with open_loader(data, seed=0, phase=phase, state=state) as loader:
        return list(loader)


def test_only_training_batches_are_changed(clicks: DataConfig) -> None:
    data = with_uses(clicks)
    assert any((batch.values == UNBOUNDED_DEFAULT_ID).any() for batch in read(data))
    for phase, config in (("eval", data), ("train", with_uses(clicks, scored=True)), ("train", clicks)):
        plain = read(DataConfig(**{**vars(config), "min_uses": 1}), phase)
        for batch, expected in zip(read(config, phase), plain, strict=True):
            np.testing.assert_array_equal(batch.values, expected.values)


def test_a_resumed_loader_counts_from_the_first_batch_on(clicks: DataConfig) -> None:
    data = with_uses(clicks)
    whole = read(data)
    resumed = read(data, state=whole[7].reader_state)
    for batch, expected in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(batch.values, expected.values)


def test_tables_are_named_as_the_data_names_them(clicks: DataConfig) -> None:
    source = open_source(clicks, 0)
    schema = admitted_schema(with_uses(clicks, min_uses_by_table=("topic=1",)), source.schema)
    assert {table.name: table.absent for table in schema.tables} == {
        "user": "default",
        "items": "default",
        "topic": "initial",
    }
    assert admitted_schema(clicks, source.schema) is source.schema
    with pytest.raises(InputError, match="names table 'item', the data has user, items, topic"):
        admitted_schema(with_uses(clicks, min_uses_by_table=("item=1",)), source.schema)


def test_rows_expire_by_the_days_of_the_data(tmp_path: Path) -> None:
    """User 0 was seen on day 0 alone. With two examples a day, in one batch, day 6 is batch 6."""
    lines = [f"1,{user},{3600 * (24 * day + hour)}" for day in range(8) for user, hour in ((min(day, 1), 1), (2, 23))]
    (tmp_path / "a.csv").write_text("y,user,at\n" + "".join(f"{line}\n" for line in lines))
    (tmp_path / "s.toml").write_text('label = "y"\nsparse = ["user"]\ntime = "at"\n')
    form: dict[str, Any] = {"format": "csv", "schema": str(tmp_path / "s.toml"), "eval_fraction": 0.0, "workers": 0}
    limit: dict[str, Any] = {"expire_after": 5.5, "expire_unit": "days", "expire_every": 1}
    data = DataConfig(path=str(tmp_path / "a.csv"), batch_size=2, **form, **limit)
    found = [[rows.ids.tolist() for rows in batch.expired] for batch in read(data)]
    assert found == [[]] * 6 + [[[0]]] + [[]]
    assert all(batch.times_s is None for batch in read(DataConfig(**{**vars(data), "scored": True})))
    source = PlannedData(data, 0)
    assert source.schema.features[0].name == "user"
    (tmp_path / "s.toml").write_text('label = "y"\nsparse = ["user"]\n')
    for opened in (lambda: read(data), lambda: PlannedData(data, 0)):
        with pytest.raises(InputError, match=r"data\.expire_unit days needs a clock: expected a column"):
            opened()


@given(
    log=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=24),
    min_uses=st.integers(1, 3),
    limit=st.integers(1, 7),
    every=st.integers(1, 4),
)
def test_admission_and_expiry_together_follow_the_log(
    log: list[list[int]], min_uses: int, limit: int, every: int
) -> None:
    """An id whose row expires is counted from 0 again; the default row, 6, lasts."""
    config = DataConfig(min_uses=min_uses, expire_after=limit, expire_unit="steps", expire_every=every)
    schema = DataSchema(
        label="label", dense=(), features=(Feature(name="f", table="t"),), tables=(Table(name="t", rows=6),)
    )
    stage = row_stage(config, schema, "train")
    assert stage is not None
    uses: Counter[int] = Counter()
    last_use: dict[int, int] = {}
    for now, ids in enumerate(log):
        batch = stage(make_batch(now, [[ids]]))
        expired = set()
        if now % every == 0:
            expired = {i for i, then in last_use.items() if i != 6 and now - then > limit and now - then >= LEAST_GAP}
        for i in expired:
            del last_use[i], uses[i]
        uses.update(ids)
        read = [i if uses[i] >= min_uses else 6 for i in ids]
        assert batch.values.tolist() == read
        assert batch.is_born is not None
        assert batch.is_born.tolist() == [i not in last_use for i in read]
        assert {i for rows in batch.expired for i in rows.ids.tolist()} == expired
        last_use.update(dict.fromkeys(read, now))


def test_an_unknown_table_is_refused_whatever_its_age(clicks: DataConfig) -> None:
    config = DataConfig(**{**vars(clicks), "expire_after": 5.0, "expire_after_by_table": ("nobody=0",)})
    with pytest.raises(InputError, match=r"data\.expire_after_by_table names table 'nobody', the data has user, items"):
        read(config)
