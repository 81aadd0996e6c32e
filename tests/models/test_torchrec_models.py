from __future__ import annotations

import pytest

from bagpipe.config.sections import ModelConfig
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import MODELS, build_model
from bagpipe.types.schema import DataSchema
from tests.trainer.schemas import schema_of


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_and_converted(name: str) -> None:
    schema = schema_of(None, None, None)
    converted = convert(build_model(schema, ModelConfig(name=name, embedding_dim=4)), schema)
    assert [table.name for table in converted.row_tables] == ["t0", "t1", "t2"]
    assert {table.dim for table in converted.row_tables} == {5 if name == "wide-deep" else 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(name="gpt"), "model.name must be one of dlrm"),
        (ModelConfig(factory="nothing"), "module:function"),
        (ModelConfig(factory="no_such_module:f"), "no module 'no_such_module'"),
        (ModelConfig(factory="bagpipe.models.torchrec_models:no_such_function"), "no function 'no_such_function'"),
        (ModelConfig(factory="tests.models.test_torchrec_models:returns_no_module"), "return a module, got int"),
        (ModelConfig(name="wide-deep", top_mlp=()), "model.top_mlp"),
        (ModelConfig(name="towers", bottom_mlp=()), "model.bottom_mlp"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(config: ModelConfig, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model(schema_of(4), config)


def test_towers_share_the_features_between_seven_branches() -> None:
    def widths(num_features: int) -> list[int]:
        schema = schema_of(*[4] * num_features, dense=2)
        model = build_model(schema, ModelConfig(name="towers", bottom_mlp=(8, 6)))
        return [branch._mlp[0]._linear.in_features for branch in model.branches]

    assert widths(3) == [2, 2, 6, 2, 6, 2, 6]
    assert widths(15) == [10, 10, 10, 10, 10, 10, 14]


def returns_no_module(schema: DataSchema, config: ModelConfig) -> int:
    return 3


def test_models_with_an_interaction_need_one_dimension() -> None:
    with pytest.raises(InputError, match=r"tables of one dimension, the schema has \[4, 8\]"):
        build_model(schema_of(4, 8), ModelConfig(name="dlrm"))
    build_model(schema_of(4, 8), ModelConfig(name="wide-deep"))
