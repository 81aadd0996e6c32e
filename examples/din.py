"""Deep Interest Network: the target item attends over the user's behaviour.

python -m examples.din --steps 200

    target ─┬──────────────────────────────────────────┐
    history ┴─ [h, t, h - t, h * t] ─> MLP ─> weights ─┴─> [sum of weight * h, t, user] ─> MLP ─> click

Target and history read the same table: a row gets the gradient of both, and one update. The weights are not
normalised, as in the paper.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv 1706.06978.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import bagpipe
from bagpipe.models.din import DIN

NUM_USERS, NUM_ITEMS, NUM_CATEGORIES = 20_000, 5_000, 20
MAX_HISTORY = 20
DIM = 16


def make_model(device: str = "meta") -> DIN:
    """The model with its tables on `device`. On the meta device they take no memory: the rows live in the store."""
    torch.manual_seed(0)
    sizes = {"embedding_dim": DIM, "weight_init_min": -0.1, "weight_init_max": 0.1}
    configs = [
        EmbeddingConfig(name="user", num_embeddings=NUM_USERS, feature_names=["user"], **sizes),
        EmbeddingConfig(name="item", num_embeddings=NUM_ITEMS, feature_names=["target", "history"], **sizes),
    ]
    return DIN(EmbeddingCollection(tables=configs, device=torch.device(device)), dim=DIM, others=["user"])


def make_batches(num: int, batch_size: int, seed: int) -> Iterator[tuple[KeyedJaggedTensor, Tensor]]:
    """Clicks depend on the category of the target, and on whether it is in the history. Some histories are empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw_items(categories: Tensor) -> Tensor:
        per_category = NUM_ITEMS // NUM_CATEGORIES
        numbers = torch.rand(categories.shape, generator=generator) ** 3 * per_category  # small numbers are frequent
        return numbers.long() * NUM_CATEGORIES + categories

    for _ in range(num):
        users = torch.randint(NUM_USERS, (batch_size,), generator=generator)
        lengths = torch.randint(0, MAX_HISTORY + 1, (batch_size,), generator=generator)
        # Each example's history is of three categories.
        liked = torch.randint(NUM_CATEGORIES, (batch_size, 3), generator=generator)
        picks = torch.randint(3, (int(lengths.sum()),), generator=generator)
        history = draw_items(liked.repeat_interleave(lengths, 0).gather(1, picks[:, None]).squeeze(1))
        is_liked = torch.rand(batch_size, generator=generator) < 0.5
        wanted = torch.where(is_liked, liked[:, 0], torch.randint(NUM_CATEGORIES, (batch_size,), generator=generator))
        score = 3 * (is_liked & (lengths > 0)) + (wanted % 4) - 3.0
        labels = torch.rand(batch_size, generator=generator) < torch.sigmoid(score)
        ones = torch.ones(batch_size, dtype=torch.int64)
        features = KeyedJaggedTensor(
            keys=["user", "target", "history"],
            values=torch.cat([users, draw_items(wanted), history]),
            lengths=torch.cat([ones, ones, lengths]),
        )
        yield features, labels.float()


def make_pipeline(model: nn.Module, **settings: Any) -> bagpipe.TrainPipeline:
    """Rows train with lazy Adam: a row's moments change when the row is in a batch. The rest trains with Adam."""
    rows = bagpipe.optim.Adam(lr=0.005)
    return bagpipe.TrainPipeline(model, lambda p: torch.optim.Adam(p, lr=0.005), rows=rows, **settings)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="URL of a store; without it the job starts a server of its own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cache-rows", type=int, default=20_000)
    options = parser.parse_args(arguments)
    batches = make_batches(options.steps, batch_size=256, seed=int(os.environ.get("RANK", "0")))
    settings = {"namespace": "example-din", "existing": "reset", "cache_rows": options.cache_rows}
    with make_pipeline(make_model(), store=options.store, **settings) as pipeline:
        for step, _ in enumerate(pipeline.train(batches), start=1):
            if step % 50 == 1:
                print(f"step {step}: loss {pipeline.loss:.4f}")
        held_out = list(make_batches(10, batch_size=256, seed=1000))
        losses = [
            F.binary_cross_entropy(found, labels)
            for found, (_, labels) in zip(pipeline.evaluate(held_out), held_out, strict=True)
        ]
    print(f"log loss on batches not trained on: {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    main()
