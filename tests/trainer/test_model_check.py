"""A user's model is called once before a job begins: what it returns, and what remains of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from bagpipe.config.sections import Config, ModelConfig
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table
from tests.trainer.factories import restless, returning
from tests.trainer.schemas import schema_of
from trainer.assembly import build_training_model
from trainer.model_check import check_expiring_tables, check_model

SCHEMA = schema_of(None, None)


def check(make: Callable[..., Any], schema: DataSchema = SCHEMA) -> Any:
    converted = convert(make(schema, ModelConfig(embedding_dim=4)), schema)
    rows = converted.row_schema(optimizer="sgd", seed=0, rounding="nearest")
    check_model(converted, schema, rows, torch.device("cpu"), "mine:build")
    return converted.model


@pytest.mark.parametrize(
    "forward",
    [
        lambda dense, vectors: vectors.sum(1),
        lambda dense, vectors: vectors.sum(1, keepdim=True),
        lambda dense, vectors: (vectors.sum(1), dense[:, :1]),
        lambda dense, vectors: vectors.sum(1).double(),
    ],
)
@pytest.mark.parametrize("schema", [SCHEMA, schema_of(4, weighted=True, dense=1)], ids=["plain", "weighted"])
def test_logits_are_accepted(forward: Any, schema: DataSchema) -> None:
    check(returning(forward), schema)


def test_several_labels_need_a_logit_each() -> None:
    schema = dataclasses.replace(SCHEMA, label=("click", "buy"), example_weight="w")
    check(returning(lambda dense, vectors: (vectors.sum(1), dense[:, :1])), schema)
    with pytest.raises(InputError) as caught:
        check(returning(lambda dense, vectors: vectors.sum(1)), schema)
    assert str(caught.value) == (
        "model.factory mine:build: expected a tuple of 2 logits, of the labels click, buy, got 1"
    )


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda dense, vectors: vectors[:, :2], "float32 [2, 2]"),
        (lambda dense, vectors: vectors.sum(), "float32 []"),
        (lambda dense, vectors: vectors.sum(1) > 0, "bool [2]"),
        (lambda dense, vectors: {"logits": vectors.sum(1)}, "dict"),
        (lambda dense, vectors: (vectors.sum(1), None), "a tuple of float32 [2], NoneType"),
        (lambda dense, vectors: (), "tuple"),
    ],
)
def test_other_outputs_get_one_line(forward: Any, found: str) -> None:
    with pytest.raises(InputError) as caught:
        check(returning(forward))
    assert str(caught.value) == (
        "model.factory mine:build: expected one logit for each example, a floating-point tensor [num_examples] or "
        f"[num_examples, 1], or a tuple of such; got {found} for 2 examples"
    )


def test_nothing_of_the_call_remains() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model = check(restless)
    # The model has no initial values that are drawn.
    assert torch.equal(torch.rand(4), expected)
    assert model.norm.num_batches_tracked == 0
    assert model.norm.running_mean.abs().max() == 0
    assert model.training
    assert model.norm.training


def test_an_error_of_the_model_keeps_its_own_frames() -> None:
    config = Config(model=ModelConfig(factory="tests.trainer.factories:breaks_in_forward", embedding_dim=4))
    with pytest.raises(ZeroDivisionError) as caught:
        build_training_model(config, SCHEMA)
    assert caught.traceback[-1].name == "_divide"
    assert caught.value.__notes__ == [
        "model.factory tests.trainer.factories:breaks_in_forward: called on a batch of 2 examples before training"
    ]


def test_a_factory_is_checked_before_a_job() -> None:
    config = Config(model=ModelConfig(factory="tests.trainer.factories:called", embedding_dim=4))
    with pytest.raises(InputError, match=r"factories:called: expected one logit .* got float32 \[2, 2\]"):
        build_training_model(config, SCHEMA)


@pytest.mark.parametrize("name", ["items", "dotted"])
def test_names_that_torchrec_cannot_hold(name: str) -> None:
    config = Config(model=ModelConfig(factory=f"tests.trainer.factories:{name}", embedding_dim=4))
    with pytest.raises(
        InputError, match=r"torchrec cannot hold a table of that name .*choose another, or make the tables"
    ):
        build_training_model(config, SCHEMA)


def test_other_key_errors_are_the_factorys() -> None:
    config = Config(model=ModelConfig(factory="tests.trainer.factories:breaks_when_built"))
    with pytest.raises(KeyError, match="no such width"):
        build_training_model(config, SCHEMA)


def test_tables_see_all_uses_of_rows_that_expire() -> None:
    """Two features of one table of the data, read by one table of the model, by two, or one of them by none."""
    schema = DataSchema(
        label="click",
        dense=(),
        features=(Feature(name="x", table="a"), Feature(name="y", table="a"), Feature(name="z", table="b")),
        tables=(Table(name="a"), Table(name="b")),
    )

    def collection(*tables: tuple[str, ...]) -> Any:
        configs = [
            EmbeddingBagConfig(name=f"t{n}", embedding_dim=4, num_embeddings=9, feature_names=list(features))
            for n, features in enumerate(tables)
        ]
        return convert(EmbeddingBagCollection(tables=configs), schema)

    check_expiring_tables(collection(("x", "y"), ("z",)), schema)
    for tables, message in (
        ((("x",), ("y",), ("z",)), r"'t0': with data\.expire_after expected all features .* got x of x, y"),
        ((("y",), ("z",)), r"'t0': with data\.expire_after expected all features .* got y of x, y"),
        ((("x", "y", "z"),), r"got x, y, z of x, y, z \(tables a, b\)"),
    ):
        with pytest.raises(InputError, match=message):
            check_expiring_tables(collection(*tables), schema)
