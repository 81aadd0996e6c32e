"""SASRec: a causal transformer over a user's items predicts the next one.

python -m examples.sasrec --steps 150

    sequence ─> items + positions ─> blocks of causal attention and MLP ─> state of each position
    loss: the state should score the position's next item (``positive``) above a sampled one (``negative``)

All three features read one table. The loader draws the negatives, so a batch names every row that it needs, and the
pipeline can prefetch them. Positions are dense parameters.

Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018, arXiv 1808.09781.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import bagpipe
from bagpipe.models.sasrec import SASRec

NUM_ITEMS = 10_000
MAX_LENGTH = 20
DIM = 32
NUM_BLOCKS = 2
FEATURES = ["sequence", "positive", "negative"]


def make_model(device: str = "meta") -> SASRec:
    """The model with its tables on `device`. On the meta device they take no memory: the rows live in the store."""
    torch.manual_seed(0)
    items = EmbeddingConfig(
        name="item",
        embedding_dim=DIM,
        num_embeddings=NUM_ITEMS,
        feature_names=FEATURES,
        weight_init_min=-0.1,
        weight_init_max=0.1,
    )
    collection = EmbeddingCollection(tables=[items], device=torch.device(device))
    return SASRec(collection, dim=DIM, max_length=MAX_LENGTH, num_blocks=NUM_BLOCKS)


def make_batches(num: int, batch_size: int, seed: int) -> Iterator[KeyedJaggedTensor]:
    """Walks over the items: the next one is the present one plus a step that the user keeps, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        lengths = torch.randint(1, MAX_LENGTH + 1, (batch_size,), generator=generator)
        first = (torch.rand(batch_size, 1, generator=generator) ** 3 * NUM_ITEMS).long()
        steps = torch.randint(1, 4, (batch_size, 1), generator=generator)
        noise = torch.randint(0, 2, (batch_size, MAX_LENGTH + 1), generator=generator)
        walk = (first + steps * torch.arange(MAX_LENGTH + 1) + noise) % NUM_ITEMS
        is_real = torch.arange(MAX_LENGTH) < lengths[:, None]
        negatives = torch.randint(NUM_ITEMS, (int(lengths.sum()),), generator=generator)
        yield KeyedJaggedTensor(
            keys=FEATURES,
            values=torch.cat([walk[:, :-1][is_real], walk[:, 1:][is_real], negatives]),
            lengths=lengths.repeat(3),
        )


def make_pipeline(model: nn.Module, **settings: Any) -> bagpipe.TrainPipeline:
    """Rows train with Adagrad, the rest with Adam."""
    rows = bagpipe.optim.Adagrad(lr=0.1)
    return bagpipe.TrainPipeline(model, lambda p: torch.optim.Adam(p, lr=0.003), rows=rows, **settings)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="URL of a store; without it the job starts a server of its own")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cache-rows", type=int, default=20_000)
    options = parser.parse_args(arguments)
    batches = make_batches(options.steps, batch_size=128, seed=int(os.environ.get("RANK", "0")))
    settings = {"namespace": "example-sasrec", "existing": "reset", "cache_rows": options.cache_rows}
    with make_pipeline(make_model(), store=options.store, **settings) as pipeline:
        for step, _ in enumerate(pipeline.train(batches), start=1):
            if step % 50 == 1:
                print(f"step {step}: loss {pipeline.loss:.4f}")
        right = list(pipeline.evaluate(make_batches(5, batch_size=128, seed=1000)))
    print(f"positive item above the negative one: {torch.cat(right).float().mean():.3f}")


if __name__ == "__main__":
    main()
