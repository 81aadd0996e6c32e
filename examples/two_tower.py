"""Two towers trained to retrieve: in-batch negatives with a correction of their popularity.

python examples/two_tower.py --steps 300

    user ids, history ─> bags ─> MLP ─┐
                                      ├─ scores [n, n] ─ log q ─> softmax: example i should choose item i
    item id, tags ────> bags ─> MLP ─┘

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys 2019.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import bagpipe

NUM_USERS, NUM_ITEMS, NUM_TAGS = 50_000, 20_000, 500
#: A user prefers the items of one of these groups.
NUM_GROUPS = 20
DIM = 16


@dataclass
class Batch:
    """A batch of a class of your own: anything with tensors and jagged tensors, and `to`.

    Attributes:
        user: features ``user`` and ``history`` of n examples.
        item: features ``item`` and ``tags``.
        log_q: float32 ``[n]``, log of the probability with which the item is in a batch.
    """

    user: KeyedJaggedTensor
    item: KeyedJaggedTensor
    log_q: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(*(getattr(self, field.name).to(device, non_blocking=non_blocking) for field in fields(self)))


class Tower(nn.Module):
    """Bags and an MLP over them: unit vectors ``[n, DIM]``."""

    def __init__(self, tables: list[EmbeddingBagConfig], device: str) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        num_features = sum(len(table.feature_names) for table in tables)
        self.mlp = nn.Sequential(nn.Linear(num_features * DIM, 64), nn.ReLU(), nn.Linear(64, DIM))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return F.normalize(self.mlp(self.bags(features).values()))


class TwoTower(nn.Module):
    """`forward(batch)` returns the loss and the vectors of users and items."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.user = Tower([table("user", NUM_USERS), table("history", NUM_ITEMS, PoolingType.MEAN)], device)
        self.item = Tower([table("item", NUM_ITEMS), table("tags", NUM_TAGS)], device)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        users, items = self.user(batch.user), self.item(batch.item)
        scores = self.log_scale.exp() * users @ items.T - batch.log_q
        loss = F.cross_entropy(scores, torch.arange(len(users), device=scores.device))
        return loss, (users.detach(), items.detach())


def table(name: str, rows: int, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name], pooling=pooling)


def make_model(device: str = "meta") -> TwoTower:
    """The model with its tables on `device`. On the meta device they take no memory: the rows live in the store."""
    torch.manual_seed(0)
    return TwoTower(device)


def make_batches(num: int, batch_size: int, seed: int) -> Iterator[Batch]:
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
        yield Batch(
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
