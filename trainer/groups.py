"""`GroupColumn`: the group of each scored example, its id of one feature, noted when its batch is read.

batches ──watched──> the same batches
            └── ids and bag lengths of the feature, in the order of the examples
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from bagpipe.errors import InputError
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema

__all__ = ["GroupColumn", "feature_number"]


class GroupColumn:
    """Collects groups on the host, 12 B per example.

    Args:
        feature: number of the feature in the schema.
    """

    def __init__(self, feature: int) -> None:
        self._feature = feature
        self._ids: list[Tensor] = []
        self._lengths: list[Tensor] = []

    def watched(self, batches: Generator[RankBatch, None, None]) -> Generator[RankBatch, None, None]:
        """The batches, noted when they are read. The caller closes them."""
        for rank_batch in batches:
            self.add(rank_batch.batch)
            yield rank_batch

    def add(self, batch: Batch) -> None:
        """Note the examples of a batch. An empty bag has id 0 and length 0, one of several ids its first id."""
        start, stop = batch.feature_offsets()[self._feature : self._feature + 2]
        lengths = batch.lengths[self._feature]
        ids = np.zeros(batch.num_examples, np.int64)
        ids[lengths > 0] = batch.values[start:stop][(np.cumsum(lengths) - lengths)[lengths > 0]]
        self._ids.append(torch.from_numpy(ids))
        self._lengths.append(torch.from_numpy(lengths.copy()))

    def columns(self) -> tuple[Tensor, Tensor]:
        """int64 ``[n]`` ids and int32 ``[n]`` bag lengths of all examples."""
        empty = torch.empty(0, dtype=torch.int64)
        return torch.cat([empty, *self._ids]), torch.cat([empty.int(), *self._lengths])


def feature_number(data: DataSchema, name: str) -> int:
    """Number of a feature. Raises InputError: there is none of this name."""
    names = [feature.name for feature in data.features]
    if name not in names:
        raise InputError(f"eval.group must be a feature of the data, one of {', '.join(names)}, got {name!r}")
    return names.index(name)
