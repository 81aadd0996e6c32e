"""`MixedBags`: two embedding-bag collections as one, for data in which only some features have per-id weights.

    KeyedJaggedTensor ─┬─ weighted:   tables with sum pooling  ─┐
                       └─ unweighted: tables with mean pooling ─┴──> KeyedTensor, tables in the order given

A torchrec collection applies weights to all of its tables or to none, and weighted tables must be summed: torch defines
no mean of weighted vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["MixedBags"]


class MixedBags(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """A weighted and an unweighted collection, called like one collection of all their tables.

    Args:
        weighted, unweighted: the collections; each feature is in one of them.
        configs: the configs of all their tables, in the order of the result.
    """

    def __init__(
        self, *, weighted: EmbeddingBagCollection, unweighted: EmbeddingBagCollection, configs: Sequence[Any]
    ) -> None:
        super().__init__()
        self.weighted = weighted
        self.unweighted = unweighted
        self._configs = list(configs)
        self._names = [name for names in get_embedding_names_by_table(self._configs) for name in names]
        self._widths = [config.embedding_dim for config in self._configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors ``[num_examples, sum of dims]``: table after table, each with its features in order."""
        vectors: dict[str, torch.Tensor] = {}
        for bags in (self.weighted, self.unweighted):
            pooled = bags(features)
            # `split` has one backward for all parts; each slice would allocate a gradient of all columns.
            parts = torch.split(pooled.values(), pooled.length_per_key(), dim=1)
            vectors.update(zip(pooled.keys(), parts, strict=True))
        values = torch.cat([vectors[name] for name in self._names], dim=1)
        return KeyedTensor(keys=self._names, length_per_key=self._widths, values=values)

    def embedding_bag_configs(self) -> list[Any]:
        return self._configs

    def is_weighted(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        device: torch.device = self.weighted.device
        return device
