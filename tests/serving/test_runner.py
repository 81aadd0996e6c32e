"""Inputs that a `Scorer` refuses. `tests/system/test_exported_scores.py` compares its scores with predictions."""

from __future__ import annotations

import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from bagpipe.embedding.materialise import materialise
from bagpipe.errors import InputError
from bagpipe.serving import Bags, Scorer, load
from bagpipe.serving.manifest import MANIFEST, PROGRAM_FILE, ExportFile, file_checksum, read_manifest
from bagpipe.serving.program import as_dense_part, save_program
from tests.serving.exports import DATA, exported, source_of, store_of, write_rows


class Model(torch.nn.Module):
    """The sum of the numbers and of all weights of `user` and `city`."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=1, feature_names=[name])
            for name, dim in (("user", 3), ("city", 5))
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        return dense.sum(1) + self.bags(sparse).values().sum(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    part = as_dense_part(Model())
    materialise(part.model, torch.device("cpu"), torch.float32)

    def save(path: Path) -> None:
        save_program(part, path, num_dense=2, dtype=torch.float32)

    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, np.random.default_rng(1), 9)
        source = source_of(store, 5)
        manifest = replace(source.manifest, columns=part.columns, data=replace(DATA, dense=("x", "y")))
        out = tmp_path / os.fsdecode(b"out\xe9")  # names of files need not be UTF-8
        return exported(replace(source, manifest=manifest, save_program=save), out)


def test_scores_and_what_cannot_be_scored(folder: Path) -> None:
    users, cities = np.array([3, -3]), Bags(ids=np.array([1, 2, 3]), lengths=np.array([0, 3]))
    numbers = np.array([[1, 2], [3, 4]], np.float64)
    with load(str(folder), verify=True) as scorer:
        rows = scorer.rows.read({"user": users, "city": cities.ids})
        expected = numbers.sum(1) + rows["user"].sum(1) + [0, rows["city"].sum()]
        found = scorer({"user": users, "city": cities}, numbers)
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)), rtol=1e-5)
        _refuses(scorer, users, cities, numbers)
    pickled = folder.parent / "pickled"
    shutil.copytree(folder, pickled)
    with zipfile.ZipFile(pickled / PROGRAM_FILE, "a") as file:
        file.writestr("dense/data/sample_inputs/other.pt", b"x")
    size, checksum = (pickled / PROGRAM_FILE).stat().st_size, file_checksum(pickled / PROGRAM_FILE)
    manifest = read_manifest(folder)
    files = {**manifest.files, PROGRAM_FILE: ExportFile(num_bytes=size, sha256=checksum)}
    (pickled / MANIFEST).write_bytes(replace(manifest, files=files).encode())
    with pytest.raises(InputError, match=r"other\.pt holds a pickle"):
        load(pickled)
    (folder / PROGRAM_FILE).write_bytes(bytes((folder / PROGRAM_FILE).stat().st_size))
    with pytest.raises(InputError, match=r"dense\.pt2 does not match its checksum"):
        load(folder)


def _refuses(scorer: Scorer, users: np.ndarray, cities: Bags, numbers: np.ndarray) -> None:
    for features, dense, words in (
        ({"user": users}, numbers, r"feature 'city' is missing, got \['user'\]"),
        ({"user": users[:1], "city": cities}, numbers, "features must have equal numbers of examples"),
        ({"user": users, "city": cities}, None, r"expected numbers \[2, 2\] of x, y, got none"),
        ({"user": users, "city": cities}, numbers[:1], r"got \[1, 2\]"),
    ):
        with pytest.raises(InputError, match=words):
            scorer(features, dense)
