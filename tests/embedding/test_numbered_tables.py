"""Names of tables in a model: torchrec's where they are unique, after the path of the collection where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from bagpipe.embedding.model_tables import held_weights, schema_of, table_rows
from bagpipe.embedding.torchrec_collections import Converted, convert
from bagpipe.errors import InputError
from bagpipe.optim import SGD, Adagrad, Frozen


def _bags(*names: str, rows: int = 50, device: str = "meta") -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=rows, feature_names=[f"f_{name}"])
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device(device))


def _sequences(*names: str, device: str = "meta") -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=70, feature_names=[f"f_{name}"]) for name in names
    ]
    return EmbeddingCollection(tables=tables, device=torch.device(device))


class _Towers(nn.Module):
    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.deep = _bags("item", "user", device=device)
        self.towers = nn.ModuleList([_bags("item", rows=60, device=device)])
        self.history = _sequences("item", "shop", device=device)
        self.again = self.deep


NAMES = ["deep.item", "user", "towers.0.item", "history.item", "shop"]


def _convert(model: nn.Module, **more: Any) -> Converted:
    return convert(model, schema_of(model), **more)


def test_a_name_of_several_collections_follows_their_paths() -> None:
    converted = _convert(_Towers())
    assert [table.name for table in converted.row_tables] == NAMES
    assert converted.model.deep.table_names == ("deep.item", "user")
    assert [config.name for config in converted.model.deep.embedding_bag_configs()] == ["item", "user"]
    # Both read one feature: within a collection the vectors have torchrec's names.
    assert [column.name for column in converted.model.towers[0].cached_lookup.columns] == ["f_item"]


def test_everything_that_names_tables_takes_these_names() -> None:
    assert table_rows(_Towers(), ["towers.0.item"]) == dict(zip(NAMES, [50, 50, None, 70, 70], strict=True))
    assert {name: len(weight) for name, weight in held_weights(_Towers("cpu")).items()} == dict(
        zip(NAMES, [50, 50, 60, 70, 70], strict=True)
    )
    rows = {"towers.0.item": SGD(0.1), "history.item": Frozen(), "*": Adagrad(0.1)}
    converted = _convert(_Towers(), optimizers=rows, row_dtype={"history.item": "float16"})
    by_name = {table.name: table for table in converted.row_tables}
    assert {name: table.optimizer for name, table in by_name.items()} == {
        "deep.item": None,
        "user": None,
        "towers.0.item": "sgd",
        "history.item": "frozen",
        "shop": None,
    }
    assert [name for name, table in by_name.items() if table.dtype == "float16"] == ["history.item"]
    with pytest.raises(InputError, match=r"deep\.item"):
        _convert(_Towers(), optimizers={"item": SGD(0.1), "*": SGD(0.2)})


def test_names_are_those_of_a_model_that_is_not_compiled() -> None:
    converted = _convert(torch.compile(_Towers()))  # type: ignore[arg-type]
    assert [table.name for table in converted.row_tables] == NAMES
