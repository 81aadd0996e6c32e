"""Export of a running pipeline into plain torchrec models, and tensors of the rows' optimizer state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig

import bagpipe
from bagpipe.errors import InputError
from bagpipe.serving import RowClient
from tests.train_pipeline.small import DIM, FEATURES, ROWS, Small, assert_same, batches, pipeline, progress_all


class Both(Small):
    """With sequences of a table of its own, a collection under two names, and a buffer."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__(device)
        self.again = self.bags
        self.sequences = EmbeddingCollection(
            device=torch.device(device),
            tables=[EmbeddingConfig(name="s", embedding_dim=3, num_embeddings=ROWS + 7, feature_names=["f1"])],
        )
        self.over = nn.Linear(DIM * len(FEATURES), 1)
        self.register_buffer("offset", torch.ones(1))

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        scores = self.over(self.bags(batch["ids"]).values()).squeeze(-1) + self.offset
        scores = scores + self.sequences(batch["ids"])["f1"].values().sum() * 0.01
        return (scores - batch["labels"]).square().mean(), scores.detach()


def _scores(trained: bagpipe.TrainPipeline) -> list[Tensor]:
    return [scores.clone() for scores in trained.evaluate(batches(3, seed=8))]


def _plain_scores(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch)[1] for batch in batches(3, seed=8)]


def test_a_plain_model_loads_the_weights_and_scores_the_same(tmp_path: Path) -> None:
    with pipeline(Both()) as trained:
        iterator = iter(batches(8))
        for _ in range(5):
            trained.progress(iterator)
        scores = _scores(trained)
        trained.export(tmp_path / "files")
        trained.export(str(tmp_path / "dcp"), format="dcp")
        dense = trained.dense_state_dict()
        progress_all(trained, iterator)  # training goes on
        assert trained.step == 8
    plain = Both("cpu")
    plain.load_state_dict(load_file(tmp_path / "files" / "model.safetensors"), strict=True)
    for ours, theirs in zip(scores, _plain_scores(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    other = Both("cpu")
    state = {"model": other.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert_same(dict(state["model"]), dict(plain.state_dict()))
    assert dense.keys() == {"over.weight", "over.bias", "offset"}
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in dense.items())
    missing, unexpected = Both("cpu").load_state_dict(dense, strict=False)
    assert not unexpected
    assert all("embedding" in name for name in missing)


def test_optimizer_state_of_rows_and_of_the_dense_part(tmp_path: Path) -> None:
    with pipeline() as trained:
        progress_all(trained, iter(batches(3)))
        trained.export(tmp_path / "out")
        ids = trained.rows("t_f2").ids()
    states = load_file(tmp_path / "out" / "optimizer.safetensors")
    sums = states["bags.embedding_bags.t_f2.weight.sum"]
    assert sums.shape == (ROWS, DIM)
    assert torch.equal(sums.sum(1).nonzero().squeeze(1), ids)
    assert states["over.weight.exp_avg"].shape == (1, DIM * len(FEATURES))


def test_a_table_without_bound_has_the_rows_of_the_store(tmp_path: Path) -> None:
    with pipeline(unbounded="t_f0") as trained:
        progress_all(trained, iter(batches(2)))
        trained.export(tmp_path / "out")
        rows = trained.rows("t_f0")
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert torch.equal(weights["bags.embedding_bags.t_f0.ids"], rows.ids())
        assert torch.equal(weights["bags.embedding_bags.t_f0.weight"], rows[rows.ids()])
        new = [row_id for row_id in range(50) if row_id not in rows.ids()][:3]
        ids = np.array([*rows.ids()[:2].tolist(), *new, -(2**60)])
        client = RowClient.open(tmp_path / "out", verify=True)
        assert np.array_equal(client.read({"t_f0": ids})["t_f0"], rows[torch.from_numpy(ids)].numpy())


def test_what_cannot_be_written_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pipeline() as trained:
        iterator = iter(batches(2))
        trained.progress(iterator)
        with pytest.raises(InputError, match=r"^folder .*full is not empty"):
            trained.export(tmp_path / "full")
        with pytest.raises(InputError, match="format must be one of safetensors, dcp, got 'onnx'"):
            trained.export(tmp_path / "x", format="onnx")  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"more than max_gib=9.31323e-10 allows"):
            trained.export(tmp_path / "x", max_gib=2**-30)
        trained.progress(iterator)
