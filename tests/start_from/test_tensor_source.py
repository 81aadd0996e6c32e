"""A torchrec model's tensors, saved by torch.distributed.checkpoint and safetensors, as what a new job takes from."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from bagpipe.errors import InputError
from bagpipe.start_from import source
from bagpipe.start_from.open_source import open_source
from bagpipe.start_from.tensor_source import TensorSource


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
    save_file({**named, "optimizer.x": torch.zeros(3)}, folder / "model.safetensors")
    return folder / "model.safetensors"


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


def test_shards_of_rows_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of two shards each, as torchrec's row-wise and column-wise sharding leaves them."""
    monkeypatch.setattr("bagpipe.start_from.tensor_source.CHUNK_BYTES", 3 * 16)
    whole = torch.arange(40.0).reshape(10, 4)
    name = "model.ebc.embedding_bags.user.weight"
    chunks, places = [], {}
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        for top, left in ((0, 0), (0, 1), (5, 0), (5, 1)):
            part = whole[top : top + 5, left : left + (1, 3)[left]].contiguous()
            first = file.tell()
            torch.save(part, file)
            chunks.append(ChunkStorageMetadata(offsets=torch.Size((top, left)), sizes=part.shape))
            places[MetadataIndex(name, torch.Size((top, left)))] = _StorageInfo(
                "__0_0.distcp", first, file.tell() - first
            )
    record = TensorStorageMetadata(
        properties=TensorProperties.create_from_tensor(whole), size=whole.shape, chunks=chunks
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({name: record}, storage_data=places)))
    table = open_source(str(tmp_path)).tables["user"]
    assert torch.equal(torch.cat([chunk.weights for chunk in table.chunks()]), whole)


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


class Attack:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_files_that_name_other_code_are_refused(tmp_path: Path) -> None:
    folder, trap = save_dcp(Model(), tmp_path), tmp_path / "trap"
    attack = Attack(trap)
    good = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(attack))
    with pytest.raises(InputError, match=r"it names \w+\.system, which is no record of torch\.distributed\.checkpoint"):
        open_source(str(folder))
    (folder / ".metadata").write_bytes(good[: len(good) // 2])
    with pytest.raises(InputError, match=r"is not that of torch\.distributed\.checkpoint"):
        open_source(str(folder))
    (folder / ".metadata").write_bytes(good)
    (shards,) = folder.glob("*.distcp")
    torch.save(attack, tmp_path / "evil")
    shards.write_bytes((tmp_path / "evil").read_bytes() + b"\0" * shards.stat().st_size)
    found = open_source(str(folder))
    assert isinstance(found, TensorSource)
    with pytest.raises(InputError, match=r"the shard of \S+ cannot be read"):
        list(found.tables["user"].chunks())
    assert not trap.exists()
