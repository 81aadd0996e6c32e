"""A torchrec model's tensors, saved by torch.distributed.checkpoint and safetensors, as what a new job takes from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from bagpipe.errors import InputError
from bagpipe.start_from import source
from bagpipe.start_from.open_source import open_source


class Model(nn.Module):
    """Bags, a sequence, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        user = EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name="user", feature_names=["user"])
        shop = EmbeddingBagConfig(num_embeddings=7, embedding_dim=4, name="shop", feature_names=["shop"])
        item = EmbeddingConfig(num_embeddings=9, embedding_dim=4, name="item", feature_names=["item"])
        self.bags = EmbeddingBagCollection(tables=[user, shop], device=torch.device("cpu"))
        self.sequence = EmbeddingCollection(tables=[item], device=torch.device("cpu"))
        self.over = nn.Linear(12, 1)
        self.norm = nn.BatchNorm1d(12)


def save_dcp(model: nn.Module, folder: Path) -> Path:
    adam = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state = {"model": model.state_dict(), "optimizer": adam.state_dict()}
        save(state, storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def save_wrapped(model: nn.Module, folder: Path) -> Path:
    """As of a model inside DMP and torch.compile."""
    named = {f"module._dmp_wrapped_module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    path = folder / os.fsdecode(b"mod\xe8le.safetensors")  # names of files need not be UTF-8
    save_file({**named, "optimizer.x": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize("write", [save_dcp, save_wrapped])
def test_a_torchrec_models_weights(
    tmp_path: Path, write: Callable[[nn.Module, Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagpipe.start_from.tensor_source.CHUNK_BYTES", 10 * 16)  # ten rows a chunk
    torch.manual_seed(3)
    model = Model()
    weights = model.state_dict()
    found = open_source(str(write(model, tmp_path)))
    tables = {"user": "bags.embedding_bags", "shop": "bags.embedding_bags", "item": "sequence.embeddings"}
    assert found.tables.keys() == tables.keys()
    for name, place in tables.items():
        table = found.tables[name]
        expected = weights[f"{place}.{name}.weight"]
        assert (table.dim, table.dtype, table.optimizer) == (4, "float32", "")
        assert table.extent() == source.Extent(num_rows=len(expected), least=0, largest=len(expected) - 1)
        chunks = list(table.chunks())
        assert len(chunks) == -(-len(expected) // 10)
        assert np.array_equal(np.concatenate([chunk.ids for chunk in chunks]), np.arange(len(expected)))
        assert torch.equal(torch.cat([chunk.weights for chunk in chunks]), expected)
    dense = {name: value for name, value in weights.items() if name.startswith(("over", "norm"))}
    assert found.outline(frozenset(dense)).tensors.keys() == {f"model.{name}" for name in dense}
    some = found.dense(0, frozenset(["over.weight", "norm.running_mean"])).tensors
    assert some.keys() == {"model.over.weight", "model.norm.running_mean"}
    assert torch.equal(some["model.over.weight"], weights["over.weight"])


def test_ids_beside_the_rows(tmp_path: Path) -> None:
    weight, ids = torch.rand(3, 4), torch.tensor([-7, 0, 2**60])
    base = "embedding_bags.user"
    save_file({f"x.{base}.weight": weight, f"x.{base}.ids": ids}, tmp_path / "a.safetensors")
    table = open_source(str(tmp_path)).tables["user"]
    assert table.extent() == source.Extent(num_rows=3, least=-7, largest=2**60)
    (chunk,) = table.chunks()
    assert chunk.ids.tolist() == ids.tolist()
    save_file({f"x.{base}.weight": weight, f"x.{base}.ids": ids.flip(0)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"x\.embedding_bags\.user\.ids: expected ascending, distinct ids"):
        open_source(str(tmp_path)).tables["user"].extent()
