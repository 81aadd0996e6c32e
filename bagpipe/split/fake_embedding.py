"""`fake_output`: the output of an embedding collection with zeros for rows. The only module of split/ with torchrec.

collection's configs ──> KeyedTensor [num_examples, sum of dims], or {name: JaggedTensor [ids, dim]} if not pooled
"""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import torch

with warnings.catch_warnings():  # importing torchrec warns about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

__all__ = ["fake_output"]

#: torchrec ships no types.
Untyped: TypeAlias = Any

#: Ids per example and feature. More than one, so that the rows of an unpooled tensor are not taken for examples.
NUM_IDS = 3


def fake_output(collection: Untyped, num_examples: int, dtype: torch.dtype, device: torch.device) -> Any:
    """The output of a cached or a torchrec collection: zeros that require a gradient."""
    if isinstance(collection, EmbeddingBagCollectionInterface):
        configs = collection.embedding_bag_configs()
        widths = [config.embedding_dim for config in configs for _ in config.feature_names]
        names = [name for names in get_embedding_names_by_table(configs) for name in names]
        values = torch.zeros(num_examples, sum(widths), dtype=dtype, device=device, requires_grad=True)
        return KeyedTensor(keys=names, length_per_key=widths, values=values)
    configs = collection.embedding_configs()
    return {
        name: _fake_sequences(num_examples, config.embedding_dim, collection.need_indices(), dtype, device)
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for name in names
    }


def _fake_sequences(
    num_examples: int, dim: int, need_indices: bool, dtype: torch.dtype, device: torch.device
) -> JaggedTensor:
    num_ids = num_examples * NUM_IDS
    return JaggedTensor(
        values=torch.zeros(num_ids, dim, dtype=dtype, device=device, requires_grad=True),
        lengths=torch.full((num_examples,), NUM_IDS, device=device),
        weights=torch.zeros(num_ids, dtype=torch.int64, device=device) if need_indices else None,
    )
