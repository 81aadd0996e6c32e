"""Multi-gate mixture of experts: two labels, each with its own mixture and tower, and a weight for each example.

python -m examples.mmoe --steps 200

    features ─> bags ─┬─> experts 1 … 4 ──┬─ mixed by the gate of "click" ──> tower ─> click
                      └─> gates ──────────┴─ mixed by the gate of "buy" ────> tower ─> buy
    loss = sum over tasks of  weight of the task * mean of (weight of the example * its loss)

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import bagpipe
from bagpipe.models.mmoe import MMoE

#: Table -> rows. The feature of a table has its name.
TABLES = {"user": 30_000, "item": 30_000, "category": 200}
NUM_DENSE = 3
DIM = 16
NUM_EXPERTS = 4
#: Task -> its weight in the loss.
TASKS = {"click": 1.0, "buy": 0.5}


def make_model(device: str = "meta") -> MMoE:
    """The model with its tables on `device`. On the meta device they take no memory: the rows live in the store."""
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in TABLES.items()
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device(device))
    return MMoE(bags, tasks=TASKS, num_dense=NUM_DENSE, num_experts=NUM_EXPERTS, expert_mlp=(32, 16), tower_mlp=(16,))


def make_batches(num: int, batch_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Clicks depend on user and category; of the clicked items, users buy by price (a dense input) and category."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        uniform = torch.rand(2, batch_size, generator=generator)
        users, items = (
            uniform**3 * torch.tensor([[TABLES["user"]], [TABLES["item"]]])
        ).long()  # small ids are frequent
        categories = items % TABLES["category"]
        dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
        draws = torch.rand(2, batch_size, generator=generator)
        click = draws[0] < torch.sigmoid((users % 3 + categories % 3 - 2.0) * 2 + dense[:, 1])
        buy = click & (draws[1] < torch.sigmoid(2 * dense[:, 0] + (categories % 3 - 1.0)))
        yield {
            "sparse": KeyedJaggedTensor(
                keys=list(TABLES),
                values=torch.cat([users, items, categories]),
                lengths=torch.ones(len(TABLES) * batch_size, dtype=torch.int64),
            ),
            "dense": dense,
            "weight": 0.5 + 1.5 * torch.rand(batch_size, generator=generator),
            "click": click.float(),
            "buy": buy.float(),
        }


def make_pipeline(model: nn.Module, **settings: Any) -> bagpipe.TrainPipeline:
    """The large tables train with Adagrad, the small one with Adam, the rest with Adam too."""
    rows = {"*": bagpipe.optim.Adagrad(lr=0.1), "category": bagpipe.optim.Adam(lr=0.01)}
    return bagpipe.TrainPipeline(model, lambda p: torch.optim.Adam(p, lr=0.005), rows=rows, **settings)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="URL of a store; without it the job starts a server of its own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cache-rows", type=int, default=20_000)
    options = parser.parse_args(arguments)
    batches = make_batches(options.steps, batch_size=256, seed=int(os.environ.get("RANK", "0")))
    settings = {"namespace": "example-mmoe", "existing": "reset", "cache_rows": options.cache_rows}
    with make_pipeline(make_model(), store=options.store, **settings) as pipeline:
        for step, outputs in enumerate(pipeline.train(batches), start=1):
            if step % 50 == 1:
                means = ", ".join(f"mean {task} {values.mean():.3f}" for task, values in outputs.items())
                print(f"step {step}: loss {pipeline.loss:.4f}, {means}")
        held_out = list(make_batches(10, batch_size=256, seed=1000))
        outputs = list(pipeline.evaluate(held_out))
    for task in TASKS:
        losses = [
            F.binary_cross_entropy(found[task], batch[task]) for found, batch in zip(outputs, held_out, strict=True)
        ]
        print(f"log loss of {task} on batches not trained on: {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    main()
