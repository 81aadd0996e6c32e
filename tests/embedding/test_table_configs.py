from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig

from bagpipe.embedding.table_configs import UNBOUNDED_INIT_BOUND, dtype_of, row_table
from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table

SCHEMA = DataSchema(
    label="y",
    dense=(),
    features=(Feature(name="f0", table="a"), Feature(name="f1", table="b"), Feature(name="f2", table="c")),
    tables=(Table(name="a"), Table(name="b", rows=9), Table(name="c", rows=4)),
)


def config(*features: str, kind: Any = EmbeddingBagConfig, **more: Any) -> Any:
    return kind(num_embeddings=9, embedding_dim=4, name="t", feature_names=list(features), **more)


@pytest.mark.parametrize(
    ("table", "rows", "bound"),
    [
        (config("f0"), None, UNBOUNDED_INIT_BOUND),
        (config("f1", weight_init_max=0.3), 9, 0.3),
        (config("f1", weight_init_min=-0.3, weight_init_max=0.3), 9, 0.3),
        (config("f1", init_fn=partial(nn.init.uniform_, a=-0.7, b=0.7)), 9, 0.7),
        (config("f1", "f2"), 9, 1 / 3),
        (config("f2", "f0"), None, UNBOUNDED_INIT_BOUND),
    ],
)
def test_rows_and_initial_bounds(table: Any, rows: int | None, bound: float) -> None:
    found = row_table(table, SCHEMA)
    assert (found.name, found.dim, found.rows, found.init_bound) == ("t", 4, rows, bound)
    assert (found.optimizer, found.dtype) == (None, None)


def test_the_rows_that_a_user_gives_come_before_vocabularies() -> None:
    assert row_table(config("f1"), SCHEMA, {"t": None}).rows is None
    assert row_table(config("f0"), SCHEMA, {"t": 9}).rows == 9


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize(
    ("data_type", "dtype"), [(DataType.FP32, None), (DataType.FP16, "float16"), (DataType.BF16, "bfloat16")]
)
def test_the_data_type_is_the_dtype_of_the_rows(kind: Any, data_type: DataType, dtype: str | None) -> None:
    assert dtype_of(config("f0", kind=kind, data_type=data_type)) == dtype


@pytest.mark.parametrize("data_type", sorted(set(DataType) - {DataType.FP32, DataType.FP16, DataType.BF16}, key=str))
def test_other_data_types_are_refused_in_one_line(data_type: DataType) -> None:
    with pytest.raises(InputError) as caught:
        dtype_of(config("f0", data_type=data_type))
    expected = f"table 't': data_type must be one of FP32, FP16, BF16, got {data_type.value}"
    assert str(caught.value) == expected


UNIFORM = partial(nn.init.uniform_, a=-0.5, b=0.7)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"init_fn": nn.init.zeros_}, "init_fn is not supported"),
        ({"init_fn": partial(nn.init.normal_, std=0.1)}, "init_fn is not supported"),
        ({"init_fn": nn.init.uniform_}, "init_fn is not supported"),
        ({"init_fn": UNIFORM}, r"expected weight_init_max above 0 and .*, got 0\.7 and -0\.5"),
        ({"init_fn": partial(nn.init.uniform_)}, r"expected weight_init_max above 0 and .*, got 1\.0 and 0\.0"),
        ({"weight_init_min": 0.0, "weight_init_max": 1.0}, r"expected weight_init_max above 0 .*, got 1\.0 and 0\.0"),
        ({"weight_init_min": -1.0}, "expected weight_init_max above 0 .*, got None and -1"),
    ],
)
def test_initialisers_matter_where_rows_do_not_begin_with_imported_weights(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        row_table(config("f1", **more), SCHEMA)
    with pytest.raises(InputError, match=message):
        row_table(config("f1", **more), SCHEMA, imported=["another"])
    with pytest.raises(InputError, match=message):  # ids beyond the imported ones can come
        row_table(config("f0", **more), SCHEMA, imported=["t"])
    assert row_table(config("f1", **more), SCHEMA, imported=["t"]).rows == 9
