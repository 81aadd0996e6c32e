"""The admission of rows in the batches of a loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID
from data.formats import open_source
from data.loader import open_loader
from data.row_admission import admitted_schema
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
