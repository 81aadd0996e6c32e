"""`Sample`: the batches of a job, read beforehand, with ids mapped to row numbers: local tables need a vocabulary.

    LookaheadLoader ──Batch──> vocabulary of each table ──> Minibatch: rows numbered from 0 within their table

This happens before the measurement and favours the others: ours reads, parses and plans while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.oracle.rank_batch import Phase
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema
from data.formats import open_source
from data.loader import open_loader

__all__ = ["Minibatch", "Sample", "read_sample"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """One batch or a rank's part of it; B examples, F features, n ids; all tensors on the CPU.

    Attributes:
        dense: float32 ``[B, num_dense]``.
        rows: int64 ``[n]``, feature by feature, numbers within the feature's table.
        table_rows: int64 ``[n]``, the same counted over all tables.
        lengths: int32 ``[F * B]``, ids per bag.
        offsets: int64 ``[F * B + 1]``, where each bag starts.
        labels: float32 ``[B]``.
    """

    dense: Tensor
    rows: Tensor
    table_rows: Tensor
    lengths: Tensor
    offsets: Tensor
    labels: Tensor

    @property
    def num_examples(self) -> int:
        return len(self.labels)

    def part(self, rank: int, world_size: int) -> Minibatch:
        """The examples of one rank: consecutive, the same number for every rank."""
        count = self.num_examples // world_size
        bags = self.lengths.view(-1, self.num_examples)[:, rank * count : (rank + 1) * count]
        starts = self.offsets[:-1].view(-1, self.num_examples)[:, rank * count]
        sizes = bags.sum(1)
        take = torch.cat([torch.arange(a, a + n) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)])
        examples = slice(rank * count, (rank + 1) * count)
        lengths = bags.reshape(-1)
        return Minibatch(
            dense=self.dense[examples].clone(),
            rows=self.rows[take],
            table_rows=self.table_rows[take],
            lengths=lengths,
            offsets=_offsets(lengths),
            labels=self.labels[examples].clone(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """All batches of a job, and its vocabulary.

    Attributes:
        schema: of the data; every feature has a table of its own.
        ids: raw ids of each table, int64, ascending: row number -> id.
        train, held_out: batches.
    """

    schema: DataSchema
    ids: tuple[NDArray[np.int64], ...]
    train: tuple[Minibatch, ...]
    held_out: tuple[Minibatch, ...]

    @property
    def feature_names(self) -> list[str]:
        return [feature.name for feature in self.schema.features]

    @property
    def num_rows(self) -> int:
        """Number of rows of all tables."""
        return sum(map(len, self.ids))


def read_sample(config: Config) -> Sample:
    """Read the job's training and held-out examples.

    Raises:
        InputError: the data cannot be read, or tables are shared between features.
    """
    schema = open_source(config.data, config.run.seed).schema
    if [feature.table for feature in schema.features] != [table.name for table in schema.tables]:
        raise InputError("expected data with one table for each feature, got a shared table")
    train, held_out = (_batches(config, phase) for phase in ("train", "eval"))
    ids = tuple(
        np.unique(np.concatenate([part[number] for part in map(_ids, [*train, *held_out])]))
        for number in range(len(schema.features))
    )
    first_rows = np.cumsum([0, *map(len, ids)])[:-1]
    return Sample(
        schema=schema,
        ids=ids,
        train=tuple(_minibatch(batch, ids, first_rows) for batch in train),
        held_out=tuple(_minibatch(batch, ids, first_rows) for batch in held_out),
    )


def _batches(config: Config, phase: Phase) -> list[Batch]:
    with open_loader(config.data, seed=config.run.seed, phase=phase) as loader:
        return list(loader)


def _ids(batch: Batch) -> list[NDArray[np.int64]]:
    """Ids of each feature."""
    return [batch.values[start:end] for start, end in pairwise(batch.feature_offsets().tolist())]


def _minibatch(batch: Batch, ids: tuple[NDArray[np.int64], ...], first_rows: NDArray[np.int64]) -> Minibatch:
    rows = [np.searchsorted(known, values) for known, values in zip(ids, _ids(batch), strict=True)]
    lengths = torch.from_numpy(batch.lengths.reshape(-1).copy())
    return Minibatch(
        dense=torch.from_numpy(batch.dense.copy()),
        rows=torch.from_numpy(np.concatenate(rows)),
        table_rows=torch.from_numpy(
            np.concatenate([part + first for part, first in zip(rows, first_rows, strict=True)])
        ),
        lengths=lengths,
        offsets=_offsets(lengths),
        labels=torch.from_numpy(batch.labels.copy()),
    )


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
