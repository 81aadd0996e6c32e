from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import ModelConfig
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.models.task_models import TASK_MODELS
from bagpipe.models.torchrec_models import MODELS, build_model
from bagpipe.types.schema import DataSchema, Feature, Table
from tests.split.whole_models import with_plain_bags
from tests.trainer.schemas import schema_of


def with_labels(schema: DataSchema, name: str) -> DataSchema:
    """The labels that a model needs."""
    return dataclasses.replace(schema, label=("y", "z")) if name in TASK_MODELS else schema


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_and_converted(name: str) -> None:
    schema = with_labels(schema_of(None, None, None), name)
    converted = convert(build_model(schema, ModelConfig(name=name, embedding_dim=4)), schema)
    assert [table.name for table in converted.row_tables] == ["t0", "t1", "t2"]
    assert {table.dim for table in converted.row_tables} == {5 if name in ("wide-deep", "deepfm-fuxictr") else 4}


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
        (ModelConfig(name="dcnv2-fuxictr", top_mlp=()), "model.top_mlp"),
        (ModelConfig(name="deepfm-fuxictr", top_mlp=()), "model.top_mlp"),
        (ModelConfig(name="finalmlp", bottom_mlp=()), "model.bottom_mlp"),
        (ModelConfig(name="mmoe", bottom_mlp=()), "model.bottom_mlp"),
        (ModelConfig(name="esmm", top_mlp=()), "model.top_mlp"),
        (ModelConfig(name="esmm"), "model.name esmm needs data with two labels, clicks and conversions, got y"),
        (
            ModelConfig(name="finalmlp", gate_mlp=(4,), first_gate="d0,x"),
            "model.first_gate names 'x', which is no column",
        ),
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


def _dlrm_input(dense: Tensor, bottom: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    pairs = combinations([bottom, *vectors], 2)
    return [bottom, *((one * other).sum(1, keepdim=True) for one, other in pairs)]


def _doubled(dense: Tensor) -> list[Tensor]:
    """The vector of each column: four times 2, times the column."""
    return [2 * column.repeat(1, 4) for column in dense.split(1, dim=1)]


#: Model -> a module, and what it is called with: of dense columns, bottom MLP's output and vectors of a, c, b, d.
INPUTS: dict[str, tuple[str, Callable[[Tensor, Tensor, Sequence[Tensor]], list[Tensor]]]] = {
    "dlrm": ("over_arch", _dlrm_input),
    "dcnv2": ("inter_arch.crossnet", lambda dense, bottom, vectors: [bottom, *vectors]),
    "deepfm": ("inter_arch.deep_fm.dense_module", lambda dense, bottom, vectors: [bottom, *vectors]),
    "wide-deep": ("deep", lambda dense, bottom, vectors: [dense, *(vector[:, 1:] for vector in vectors)]),
    "towers": ("branches.3", lambda dense, bottom, vectors: [dense, vectors[1]]),
    "dcnv2-fuxictr": ("cross", lambda dense, bottom, vectors: [*_doubled(dense), *vectors]),
    "deepfm-fuxictr": (
        "deep",
        lambda dense, bottom, vectors: [*_doubled(dense), *(vector[:, 1:] for vector in vectors)],
    ),
    "finalmlp": ("streams.1", lambda dense, bottom, vectors: [*_doubled(dense), *vectors]),
    "mmoe": ("model.experts.0", lambda dense, bottom, vectors: [*vectors, dense]),
    "ple": ("model.levels.0.shared.0", lambda dense, bottom, vectors: [*vectors, dense]),
    "esmm": ("model.ctr", lambda dense, bottom, vectors: [*vectors, dense]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_the_input_is_the_documented_one(name: str) -> None:
    """docs/data-formats.md, "Order in the model's input": vectors table after table, dense before sparse."""
    schema = DataSchema(
        label="y",
        dense=("p", "q"),
        features=tuple(Feature(name=name, table=table) for name, table in zip("abcd", "ABAC", strict=True)),
        tables=tuple(Table(name=table, rows=3) for table in "ABC"),
    )
    schema = with_labels(schema, name)
    torch.manual_seed(1)
    model = with_plain_bags(build_model(schema, ModelConfig(name=name, embedding_dim=4, bottom_mlp=(6,), top_mlp=(5,))))
    seen: dict[str, Tensor] = {}
    path, expected = INPUTS[name]
    model.get_submodule(path).register_forward_pre_hook(lambda _, arguments: seen.update(input=arguments[0]))
    if hasattr(model, "dense_arch"):
        model.dense_arch.register_forward_hook(lambda _, arguments, output: seen.update(bottom=output))
    if hasattr(model, "numeric"):
        model.numeric.weight.data.fill_(2)
    (bags,) = [module for module in model.modules() if hasattr(module, "embedding_bag_configs")]
    dense = torch.randn(2, 2, dtype=torch.float64)
    sparse = KeyedJaggedTensor(
        keys=list("abcd"), values=torch.tensor([0, 1, 2, 1, 0, 2, 2, 1]), lengths=torch.ones(8, dtype=torch.int32)
    )
    model(dense, sparse)
    weights = {config.name: table.weight for config, table in zip(bags.configs, bags.tables, strict=True)}
    vectors = [weights["A"][[0, 1]], weights["A"][[0, 2]], weights["B"][[2, 1]], weights["C"][[2, 1]]]
    parts = expected(dense, seen.get("bottom", dense), vectors)
    torch.testing.assert_close(seen["input"], torch.cat(parts, dim=1))


#: Ids of C1 to C26 in BARS' Criteo_x1, as FuxiCTR 2 counts them, with one for padding and one for unknown ids.
CRITEO_X1 = (
    1462, 560, 413424, 248543, 307, 23, 12192, 635, 5, 54712, 5350, 409749, 3182, 29, 12500, 365811, 12, 4934, 2096, 6,
    397981, 20, 17, 88608, 98, 64073,
)  # fmt: skip

#: Configuration, rows fewer in each of 26 tables, other numbers fewer, "Total number of parameters" of the log.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    # ranking/ctr/DCNv2/DCNv2_criteo_x1 of reczoo/BARS; FuxiCTR 1.1.0 has one row less in each table
    "dcnv2-fuxictr": ({"top_mlp": (500, 500, 500)}, 1, 0, 22_018_021),
    # ranking/ctr/DeepFM/DeepFM_criteo_x1; FuxiCTR 1.1.0, whose DeepFM had no bias beside the first-order terms yet
    "deepfm-fuxictr": ({"top_mlp": (400, 400, 400), "batch_norm": True}, 1, 1, 23_429_477),
    # ranking/ctr/FinalMLP/FinalMLP_criteo_x1; FuxiCTR 2.0.1
    "finalmlp": (
        {
            "bottom_mlp": (400, 400, 400),
            "top_mlp": (1000,),
            "batch_norm": True,
            "heads": 200,
            "gate_mlp": (800,),
            "first_gate": ",".join(f"I{number}" for number in range(1, 14)),
            "second_gate": "C6",
        },
        0,
        0,
        22_478_162,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    values, fewer_rows, fewer, published = PUBLISHED[name]
    names = [f"C{number}" for number in range(1, 27)]
    schema = DataSchema(
        label="label",
        dense=tuple(f"I{number}" for number in range(1, 14)),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name, rows=size - fewer_rows) for name, size in zip(names, CRITEO_X1, strict=True)),
    )
    config = ModelConfig(name=name, embedding_dim=10, dropout=0.2, **values)
    converted = convert(build_model(schema, config), schema)
    rows = sum((table.rows or 0) * table.dim for table in converted.row_tables)
    assert rows + sum(value.numel() for value in converted.model.parameters()) - fewer == published


def test_gates_have_tables_of_their_own() -> None:
    schema = schema_of(4, None, dense=1)
    config = ModelConfig(name="finalmlp", embedding_dim=4, gate_mlp=(5,), first_gate="f1, d0", second_gate="f0,f1")
    converted = convert(build_model(schema, config), schema)
    assert [table.name for table in converted.row_tables] == [
        "t0",
        "t1",
        "t1.first_gate",
        "t0.second_gate",
        "t1.second_gate",
    ]
    assert converted.model.get_submodule("gates.0").numeric.weight.shape == (1, 4)
    assert converted.model.get_submodule("gates.1").numeric is None
