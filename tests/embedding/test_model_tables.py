"""Tables of a model as its user's data sees them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from bagpipe.embedding.model_tables import (
    embedding_parameters,
    held_weights,
    optimizers_in_backward,
    schema_of,
    table_rows,
)
from bagpipe.errors import InputError
from bagpipe.optim import SGD, Adagrad, Adam, RowWiseAdagrad

with warnings.catch_warnings():  # torchrec warns about itself
    warnings.simplefilter("ignore")
    import torchrec.optim

META = torch.device("meta")


def _model(device: torch.device = META) -> nn.Module:
    bags = EmbeddingBagCollection(
        device=device,
        tables=[
            EmbeddingBagConfig(name="user", embedding_dim=4, num_embeddings=50, feature_names=["u", "friend"]),
            EmbeddingBagConfig(name="small", embedding_dim=2, num_embeddings=20, feature_names=["friend"]),
        ],
    )
    items = EmbeddingCollection(
        device=device,
        tables=[EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=90, feature_names=["i"])],
    )
    return nn.ModuleDict({"bags": bags, "sequences": items})


def test_features_are_in_the_order_of_the_collections() -> None:
    schema = schema_of(_model())
    assert [feature.name for feature in schema.features] == ["u", "friend", "i"]
    assert [table.rows for table in schema.tables] == [None] * 3


def test_tables_have_the_rows_of_their_configs_or_any_id() -> None:
    assert table_rows(_model()) == {"user": 50, "small": 20, "item": 90}
    assert table_rows(_model(), ["user"]) == {"user": None, "small": 20, "item": 90}
    assert table_rows(_model(), ["*"]) == {"user": None, "small": None, "item": None}


def test_weights_on_real_devices_are_found() -> None:
    assert held_weights(_model()) == {}
    assert {name: tuple(w.shape) for name, w in held_weights(_model(torch.device("cpu"))).items()} == {
        "user": (50, 4),
        "small": (20, 2),
        "item": (90, 8),
    }
    assert len(embedding_parameters(_model())) == 3


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.5}, SGD(0.5)),
        (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-6}, Adagrad(0.5, eps=1e-6)),
        (torch.optim.Adam, {"lr": 0.5, "betas": [0.9, 0.999]}, Adam(0.5, eps=1e-8)),
        (torchrec.optim.Adam, {"lr": 0.5, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0}, Adam(0.5, eps=1e-8)),
        # Where nothing is named, FBGEMM's values: torch's and torchrec's classes have others.
        (torch.optim.SGD, {}, SGD(0.01)),
        (torch.optim.Adagrad, {}, Adagrad(0.01, eps=1e-8)),
        (torchrec.optim.Adagrad, {"lr": 0.5}, Adagrad(0.5, eps=1e-8)),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.5}, RowWiseAdagrad(0.5, eps=1e-8)),
        (torch.optim.SparseAdam, {}, Adam(0.01, eps=1e-8)),
    ],
)
def test_optimizers_in_backward_become_row_optimizers(kind: Any, options: dict[str, Any], expected: Any) -> None:
    model = _model()
    assert optimizers_in_backward(model) == {}
    in_backward(kind, model["bags"].parameters(), options)
    assert optimizers_in_backward(model) == {"user": expected, "small": expected}


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, "SGD of rows has no momentum, got momentum=0.9"),
        (torch.optim.Adam, {"betas": (0.5, 0.9)}, "Adam of rows has no betas"),
        (torchrec.optim.Adam, {"beta2": 0.99}, "Adam of rows has no beta2, got beta2=0.99"),
        (torch.optim.RMSprop, {}, "optimizer-in-backward RMSprop has no row optimizer"),
    ],
)
def test_options_that_rows_lack_are_refused(kind: Any, options: dict[str, Any], text: str) -> None:
    model = _model()
    in_backward(kind, model["sequences"].parameters(), options)
    with pytest.raises(InputError, match=text):
        optimizers_in_backward(model)
