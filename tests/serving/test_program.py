"""Programs of small models: any number of examples, no operation of torchrec, equal files; and models without one."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from bagpipe.embedding.materialise import materialise
from bagpipe.serving.manifest import Column
from bagpipe.serving.program import NoProgram, as_dense_part, save_program

META = torch.device("meta")


class Model(nn.Module):
    """Two collections that read one feature, and one table that two features share."""

    def __init__(self) -> None:
        super().__init__()
        shared = EmbeddingBagConfig(name="t", embedding_dim=3, num_embeddings=9, feature_names=["a", "b"])
        own = EmbeddingBagConfig(name="u", embedding_dim=2, num_embeddings=9, feature_names=["a"])
        self.first = EmbeddingBagCollection(tables=[shared], device=META)
        self.second = EmbeddingBagCollection(tables=[own], is_weighted=True, device=META)
        self.top = nn.Linear(2 + 3 + 3 + 2, 2)

    def forward(self, dense: Tensor, sparse: Any) -> tuple[Tensor, Tensor]:
        first = self.first(sparse)
        out = self.top(torch.cat([dense, first["b"], first["a"], self.second(sparse).values()], dim=1))
        return out[:, :1], out[:, 1]


class Fixed(Model):
    def forward(self, dense: Tensor, sparse: Any) -> tuple[Tensor, Tensor]:
        return super().forward(dense.reshape(len(dense), -1), sparse)


def test_a_program_takes_any_number_of_examples(tmp_path: Path) -> None:
    part = as_dense_part(Model())
    assert [column.name for column in part.columns] == ["a@t", "b", "a@u"]
    assert part.columns[2] == Column(name="a@u", feature="a", table="u", pooling="sum", weighted=True, dim=2)
    materialise(part.model, torch.device("cpu"), torch.float32)
    for name in ("dense", "again"):
        (tmp_path / name).mkdir()
        save_program(part, tmp_path / name / "dense.pt2", num_dense=2, dtype=torch.float32)
    assert (tmp_path / "dense" / "dense.pt2").read_bytes() == (tmp_path / "again" / "dense.pt2").read_bytes()
    with zipfile.ZipFile(tmp_path / "dense" / "dense.pt2") as file:
        assert not [item.filename for item in file.infolist() if item.filename.endswith(".pt") and item.file_size]
        assert str(Path(__file__).parent).encode() not in b"".join(map(file.read, file.namelist()))
    program = torch.export.load(tmp_path / "dense" / "dense.pt2").module()
    for count in (1, 2, 33):
        vectors = {column.name: torch.rand(count, column.dim) for column in part.columns}
        dense = torch.rand(count, 2)
        inputs = torch.cat([dense, vectors["b"], vectors["a@t"], vectors["a@u"]], dim=1)
        expected = part.model.top(inputs)
        found = program(dense, vectors)
        assert [tuple(head.shape) for head in found] == [(count,), (count,)]
        assert all(torch.equal(head, expected[:, number]) for number, head in enumerate(found))


def test_models_without_a_program_are_told_why(tmp_path: Path) -> None:
    sequences = EmbeddingConfig(name="s", embedding_dim=3, num_embeddings=9, feature_names=["a"])
    with pytest.raises(NoProgram, match="it reads sequences"):
        as_dense_part(nn.ModuleDict({"s": EmbeddingCollection(tables=[sequences], device=META)}))
    with pytest.raises(NoProgram, match="it has no EmbeddingBagCollection inside"):
        as_dense_part(nn.Linear(2, 2))
    part = as_dense_part(Fixed())
    materialise(part.model, torch.device("cpu"), torch.float32)
    with pytest.raises(NoProgram, match=r"^torch\.export: \w+: [^\n]*$"):
        save_program(part, tmp_path / "dense.pt2", num_dense=2, dtype=torch.float32)
