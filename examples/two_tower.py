"""Two towers trained to retrieve: in-batch negatives with a correction of their popularity.

python -m examples.two_tower --steps 300

    user ids, history ─> bags ─> MLP ─┐
                                      ├─ scores [n, n] ─ log q ─> softmax: example i should choose item i
    item id, tags ────> bags ─> MLP ─┘

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys 2019.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import bagpipe
from bagpipe.models.two_tower import TwoTower, TwoTowerBatch

NUM_USERS, NUM_ITEMS, NUM_TAGS = 50_000, 20_000, 500
#: A user prefers the items of one of these groups.
NUM_GROUPS = 20
DIM = 16


def table(name: str, rows: int, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name], pooling=pooling)


def make_model(device: str = "meta") -> TwoTower:
    """The model with its tables on `device`. On the meta device they take no memory: the rows live in the store."""
    torch.manual_seed(0)
    users = [table("user", NUM_USERS), table("history", NUM_ITEMS, PoolingType.MEAN)]
    items = [table("item", NUM_ITEMS), table("tags", NUM_TAGS)]
    user_bags, item_bags = (EmbeddingBagCollection(tables=t, device=torch.device(device)) for t in (users, items))
    return TwoTower(user_bags, item_bags, dim=DIM)


def make_batches(num: int, batch_size: int, seed: int) -> Iterator[TwoTowerBatch]:
    """Users with up to five former items, and the next item, all of the user's group."""
    generator = torch.Generator().manual_seed(seed)
    per_group = NUM_ITEMS // NUM_GROUPS

    def draw_items(groups: Tensor) -> tuple[Tensor, Tensor]:
        uniform = torch.rand(len(groups), generator=generator)
        numbers = (uniform**2 * per_group).long()  # the density of u ** 2 is 1 / (2 u): small numbers are popular
        log_q = -torch.log(2 * per_group * NUM_GROUPS * uniform.clamp(min=0.01))
        return numbers * NUM_GROUPS + groups, log_q

    for _ in range(num):
        users = torch.randint(NUM_USERS, (batch_size,), generator=generator)
        groups = users % NUM_GROUPS
        lengths = torch.randint(0, 6, (batch_size,), generator=generator)
        history, _ = draw_items(groups.repeat_interleave(lengths))
        items, log_q = draw_items(groups)
        tags = torch.stack([items % NUM_TAGS, items * 7 % NUM_TAGS], dim=1)
        ones = torch.ones(batch_size, dtype=torch.int64)
        yield TwoTowerBatch(
            user=KeyedJaggedTensor(
                keys=["user", "history"], values=torch.cat([users, history]), lengths=torch.cat([ones, lengths])
            ),
            item=KeyedJaggedTensor(
                keys=["item", "tags"], values=torch.cat([items, tags.flatten()]), lengths=torch.cat([ones, 2 * ones])
            ),
            log_q=log_q,
        )


def make_pipeline(model: nn.Module, **settings: Any) -> bagpipe.TrainPipeline:
    """Rows train with row-wise Adagrad, the rest with Adam."""
    rows = bagpipe.optim.RowWiseAdagrad(lr=0.1)
    return bagpipe.TrainPipeline(model, lambda p: torch.optim.Adam(p, lr=0.005), rows=rows, **settings)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", help="URL of a store; without it the job starts a server of its own")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cache-rows", type=int, default=30_000)
    options = parser.parse_args(arguments)
    batches = make_batches(options.steps, batch_size=256, seed=int(os.environ.get("RANK", "0")))
    settings = {"namespace": "example-two-tower", "existing": "reset", "cache_rows": options.cache_rows}
    with make_pipeline(make_model(), store=options.store, **settings) as pipeline:
        for step, _ in enumerate(pipeline.train(batches), start=1):
            if step % 50 == 1:
                print(f"step {step}: loss {pipeline.loss:.4f}")
        hits = []
        for users, items in pipeline.evaluate(make_batches(10, batch_size=256, seed=1000)):
            best = (users @ items.T).topk(10).indices
            hits.append((best == torch.arange(len(users))[:, None]).any(1).float().mean())
    print(f"recall at 10 of 256 items: {torch.stack(hits).mean():.3f}")


if __name__ == "__main__":
    main()
