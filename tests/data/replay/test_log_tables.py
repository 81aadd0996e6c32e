from __future__ import annotations

import dataclasses

import pytest

from bagpipe.config.sections import CacheConfig, CacherConfig, Config, ModelConfig, OptimConfig, RunConfig
from bagpipe.types.schema import DataSchema, Feature, Table
from data.replay.log_tables import LogTables, at_setting

#: Alternating dimensions and poolings; one table is read twice, and features are in another order.
SCHEMA = DataSchema(
    label="y",
    dense=("x",),
    features=tuple(
        Feature(name=name, table=table) for name, table in (("f", "c"), ("g", "a"), ("h", "b"), ("i", "a"), ("j", "d"))
    ),
    tables=(
        Table(name="a", dim=3),
        Table(name="b", rows=9, pooling="mean"),
        Table(name="c"),
        Table(name="d", dim=3, rows=5),
    ),
)


@pytest.mark.parametrize(
    ("model", "dtype", "weight_bytes", "gradient_bytes"),
    [
        ("towers", "run", 8, 8),
        ("wide-deep", "bfloat16", 2, 4),
        ("dlrm", "run", 8, 8),
        ("deepfm-fuxictr", "run", 8, 8),
        ("finalmlp", "run", 8, 8),
    ],
)
def test_tables_are_the_trainers(model: str, dtype: str, weight_bytes: int, gradient_bytes: int) -> None:
    """Numbers, features and bytes equal those of the model's conversion."""
    from trainer.assembly import build_training_model

    dims = {table.dim for table in SCHEMA.tables} if model not in ("dlrm", "deepfm-fuxictr") else {None}
    schema = (
        SCHEMA
        if dims != {None}
        else dataclasses.replace(SCHEMA, tables=tuple(dataclasses.replace(table, dim=None) for table in SCHEMA.tables))
    )
    model_config = ModelConfig(name=model, embedding_dim=4, bottom_mlp=(4,), top_mlp=(4,))
    if model == "finalmlp":
        model_config = dataclasses.replace(model_config, gate_mlp=(3,), first_gate="x,i,h,g", second_gate="f")
    config = Config(
        model=model_config,
        optim=OptimConfig(rows="adam", rows_by_table=("b=ftrl", "d=frozen"), rows_lr_by_table=("a=0.1",)),
        cache=CacheConfig(rows=77, dtype=dtype),
        cacher=CacherConfig(assign="locality"),
        run=RunConfig(dtype="float64" if dtype == "run" else "float32"),
    )
    tables, built = LogTables.of(schema, config), build_training_model(config, schema, 2)
    assert tables.spec(config, 2) == built.spec
    numbers = range(len(tables))
    assert tables.row_bytes.tolist() == [built.rows.row_bytes(number) for number in numbers]
    assert tables.rows.digest() == dataclasses.replace(built.rows, tables=tables.rows.tables).digest()
    assert tables.weight_bytes.tolist() == [weight_bytes * table.dim for table in built.rows.tables]
    assert tables.gradient_bytes.tolist() == [gradient_bytes * table.dim for table in built.rows.tables]
    assert [table.name for table in tables.rows.tables] == [table.name for table in built.rows.tables]


def test_a_setting_uses_the_trainers_keys() -> None:
    config = at_setting(Config(), policy="drop-unused", lookahead=3, cache_rows=9)
    assert (config.oracle.policy, config.oracle.lookahead, config.cache.rows) == ("drop-unused", 3, 9)
