"""Folders of torch.distributed.checkpoint: shards, and files that name other code."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from bagpipe.errors import InputError
from bagpipe.start_from.open_source import open_source
from bagpipe.start_from.tensor_source import TensorSource


def save_some(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state = {"ebc.embedding_bags.user.weight": torch.rand(5, 4), "over.weight": torch.rand(3)}
        save(state, storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)
    return folder / "dcp"


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


class Attack:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_files_that_name_other_code_are_refused(tmp_path: Path) -> None:
    folder, trap = save_some(tmp_path), tmp_path / "trap"
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
