"""Tables of one name in several collections: as in plain torch, and in exports and loads by the names of torchrec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

import bagpipe
from bagpipe.serving import RowClient
from tests.train_pipeline.small import ROWS, assert_same, batches

RATE = 0.05
NAMES = ("deep.item", "wide.item", "history.item", "user")


class Towers(nn.Module):
    """Three tables called item, of two dimensions, and one that has its name alone."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(0)
        where = torch.device(device)

        def bag(name: str, feature: str, dim: int) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=ROWS, feature_names=[feature])

        sequence = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=ROWS, feature_names=["f2"])
        self.deep = EmbeddingBagCollection(tables=[bag("item", "f0", 4), bag("user", "f1", 2)], device=where)
        self.wide = EmbeddingBagCollection(tables=[bag("item", "f0", 1)], device=where)
        self.history = EmbeddingCollection(tables=[sequence], device=where)
        self.over = nn.Linear(4 + 2 + 1 + 4, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        ids = batch["ids"]
        jagged = self.history(ids)["f2"]
        lengths = jagged.lengths().long()
        examples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        history = torch.zeros(len(lengths), 4).index_add(0, examples, jagged.values())
        scores = self.over(torch.cat([self.deep(ids).values(), self.wide(ids).values(), history], 1)).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


def _pipeline(model: Towers, **more: Any) -> bagpipe.TrainPipeline:
    settings: dict[str, Any] = {
        "rows": {"wide.item": bagpipe.optim.SGD(RATE), "*": bagpipe.optim.Adagrad(RATE)},
        "store": "memory://",
        "planner": "inline",
        "cache_rows": 200,
        "lookahead": 3,
        **more,
    }
    return bagpipe.TrainPipeline(model, torch.optim.SGD(model.over.parameters(), lr=RATE), **settings)


def _rows(trained: bagpipe.TrainPipeline) -> dict[str, Tensor]:
    return {name: trained.rows(name)[:] for name in NAMES}


def _weights(model: Towers) -> dict[str, Tensor]:
    """The weights of the same model in plain torchrec, by the names of its tables in a pipeline."""
    return {
        "deep.item": model.deep.embedding_bags["item"].weight,
        "wide.item": model.wide.embedding_bags["item"].weight,
        "history.item": model.history.embeddings["item"].weight,
        "user": model.deep.embedding_bags["user"].weight,
    }


def test_they_train_as_in_plain_torch() -> None:
    plain = Towers("cpu")
    weights = _weights(plain)
    adagrad = torch.optim.Adagrad([weights[name] for name in NAMES if name != "wide.item"], lr=RATE)
    sgd = torch.optim.SGD([weights["wide.item"], *plain.over.parameters()], lr=RATE)
    for batch in batches(4):
        loss, _ = plain(batch)
        adagrad.zero_grad()
        sgd.zero_grad()
        loss.backward()
        adagrad.step()
        sgd.step()
    states = []
    for cache_rows in (200, 0):
        with _pipeline(Towers("cpu"), import_weights=True, cache_rows=cache_rows) as trained:
            list(trained.train(batches(4)))
            states.append(_rows(trained))
    assert_same(*states)
    for name, weight in weights.items():
        torch.testing.assert_close(states[0][name], weight.detach())


def test_exports_have_torchrec_s_names_and_are_loaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    with _pipeline(Towers()) as trained:
        list(trained.train(batches(3)))
        trained.export(folder)
        rows = _rows(trained)
    plain = Towers("cpu")
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    assert_same(rows, {name: weight.detach() for name, weight in _weights(plain).items()})
    with RowClient.open(str(folder)) as client:
        found = client.read({name: torch.arange(ROWS).numpy() for name in NAMES})
        assert_same({name: torch.from_numpy(vectors) for name, vectors in found.items()}, rows)
    with _pipeline(Towers()) as again:
        state = str(folder / "optimizer.safetensors")
        assert set(again.load_rows_from(folder / "model.safetensors", state=state)) == set(NAMES)
        assert_same(rows, _rows(again))
    with _pipeline(Towers()) as again:
        assert again.load_rows_from(folder / "model.safetensors", ["wide.item"]) == ["wide.item"]
        assert torch.equal(again.rows("wide.item")[:], rows["wide.item"])


def test_a_job_starts_from_such_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _pipeline(Towers()) as trained:
        list(trained.train(batches(3)))
        trained.export(tmp_path / "weights")
        rows = _rows(trained)
    with _pipeline(
        Towers(), start_from=tmp_path / "weights" / "model.safetensors", checkpoint_dir=str(tmp_path / "job")
    ) as again:
        assert_same(rows, _rows(again))
    assert "dropped" not in capsys.readouterr().err
