"""Models with several labels over torchrec's collections on the meta device: the cache changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import bagpipe
from bagpipe.models.esmm import ESMM
from bagpipe.models.ple import PLE
from examples import mmoe


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=rows, feature_names=[name])
        for name, rows in mmoe.TABLES.items()
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    regular = {"dropout": 0.1, "batch_norm": True}
    if kind == "ple":
        return PLE(bags, tasks=mmoe.TASKS, num_dense=mmoe.NUM_DENSE, **regular)
    return ESMM(bags, conversion="buy", num_dense=mmoe.NUM_DENSE, **regular)


@pytest.mark.parametrize("kind", ["ple", "esmm"])
def test_the_cache_changes_no_bit(kind: str) -> None:
    def trained(cache_rows: int) -> dict[str, Any]:
        batches = mmoe.make_batches(8, batch_size=32, seed=0)
        with bagpipe.TrainPipeline(
            made(kind),
            lambda parameters: torch.optim.Adam(parameters, lr=0.005),
            rows=bagpipe.optim.Adagrad(lr=0.1),
            store="memory://",
            planner="inline",
            lookahead=3,
            cache_rows=cache_rows,
        ) as pipeline:
            losses = [pipeline.loss.clone() for _ in pipeline.train(batches)]
            rows = {name: pipeline.rows(name)[torch.arange(200)] for name in mmoe.TABLES}
            return {"losses": torch.stack(losses), **rows, **pipeline.model.state_dict()}

    direct, cached = trained(0), trained(150)
    assert direct.keys() == cached.keys()
    assert all(torch.equal(value, cached[name]) for name, value in direct.items())
    assert direct["losses"][0] != direct["losses"][-1]
