"""A small model with its own loss, its batches in several containers, and a plain torch loop of the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import bagpipe
from bagpipe.kernels.initialization import initial_weights
from bagpipe.types.schema import RowTable

ROWS, DIM, EXAMPLES = 60, 4, 8
FEATURES = ("f0", "f1", "f2")
RATE = 0.05


class Small(nn.Module):
    """Three tables, one linear layer, a squared loss."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
                for name in FEATURES
            ],
        )
        self.over = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        scores = self.over(self.bags(batch["ids"]).values()).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


class Plain(nn.Module):
    """The same model in plain torch, float64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict()
        for name in FEATURES:
            table = RowTable(name=f"t_{name}", dim=DIM, rows=ROWS, init_bound=(1 / ROWS) ** 0.5)
            weights = initial_weights(table, torch.arange(ROWS).numpy(), seed=seed, dtype="float64")
            self.tables[name] = nn.EmbeddingBag.from_pretrained(
                weights, freeze=False, mode="sum", include_last_offset=True
            )
        self.over = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        ids = batch["ids"].to_dict()
        parts = [self.tables[name](ids[name].values(), ids[name].offsets()) for name in FEATURES]
        scores = self.over(torch.cat(parts, 1)).squeeze(-1)
        return (scores - batch["labels"]).square().mean(), scores.detach()


def batches(num: int, seed: int = 0, keys: Sequence[str] = FEATURES, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Batches as dictionaries: ids with 0 to 3 per bag, labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        lengths = torch.randint(0, 4, (len(keys) * EXAMPLES,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        labels = torch.rand(EXAMPLES, generator=generator, dtype=torch.float64).to(dtype)
        made.append(
            {
                "ids": KeyedJaggedTensor.from_lengths_sync(keys=list(keys), values=ids, lengths=lengths),
                "labels": labels,
            }
        )
    return made


def pipeline(model: Small | None = None, compiled: Any = None, **more: Any) -> bagpipe.TrainPipeline:
    """A pipeline over the small model, or what torch.compile made of it, in memory and planned in this process."""
    model = Small() if model is None else model
    settings: dict[str, Any] = {
        "rows": bagpipe.optim.Adagrad(RATE),
        "store": "memory://",
        "cache_rows": 120,
        "lookahead": 3,
        "planner": "inline",
    }
    optimizer = more.pop("optimizer", None) or torch.optim.Adam(model.over.parameters(), lr=0.01)
    return bagpipe.TrainPipeline(model if compiled is None else compiled, optimizer, **{**settings, **more})


def progress_all(trained: bagpipe.TrainPipeline, iterator: Iterator[Any]) -> list[Tensor]:
    """Losses of all batches of an iterator."""
    losses: list[Tensor] = []
    while True:
        try:
            trained.progress(iterator)
        except StopIteration:
            return losses
        assert trained.loss is not None
        losses.append(trained.loss)


def state_of(trained: bagpipe.TrainPipeline) -> dict[str, Tensor]:
    """Rows of all tables and dense parameters."""
    rows = {f"t_{name}": trained.rows(f"t_{name}")[torch.arange(ROWS)] for name in FEATURES}
    return {**rows, **{name: value.detach().clone() for name, value in trained.model.named_parameters()}}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Equal bit for bit."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different
