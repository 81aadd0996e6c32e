"""`Source`: what a new job takes rows and dense weights from, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.checkpoint.dense_state import DenseState

__all__ = ["CHUNK_BYTES", "Counts", "Extent", "RowChunk", "Source", "SourceTable"]

#: Bytes of rows read at a time.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Rows of a table.

    Attributes:
        num_rows: how many there are.
        least, largest: ids; 0 and -1 without rows.
    """

    num_rows: int
    least: int = 0
    largest: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowChunk:
    """Rows in ascending order of ids, on the host.

    Attributes:
        ids: int64 ``[n]``, distinct.
        weights: ``[n, dim]``.
        state: ``[n, width]`` of the table's optimizer; None: there is none.
    """

    ids: NDArray[np.int64]
    weights: Tensor
    state: Tensor | None = None


class SourceTable(Protocol):
    """One table.

    Attributes:
        dim: weights per row.
        dtype: of the weights.
        optimizer: row optimizer whose state the rows have, without decay; empty: they have none.
        hashed_rows: ids are hashed into so many rows; None: they are not, or it is not known.
    """

    dim: int
    dtype: str
    optimizer: str
    hashed_rows: int | None

    def extent(self) -> Extent:
        """Number and range of its ids. May read all of them."""
        ...

    def chunks(self) -> Iterator[RowChunk]:
        """All rows, ascending by id, in chunks of about `CHUNK_BYTES`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counters of a job, from which its next job goes on.

    Attributes:
        rows: batches that the rows' optimizers have stepped over, in all jobs before.
        schedule: batches after which the schedules of learning rates stand.
        dense, masks: batches that its dense part and its stages' random numbers count, as in `EarlierSteps`.
        progress: of its first rank, as `Part.progress` has it.
    """

    rows: int = 0
    schedule: int = 0
    dense: int = 0
    masks: int = 0
    progress: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Weights of another job or program.

    Attributes:
        label: its name for people.
        tables: by name.
        settings: of its job, by name, as a manifest has them; empty: not known.
        seed: of its job's initial rows; None: not known.
        counts: of its job.
        world_size: ranks of its job, each with its own random state; 0: there is none.
        checkpoint_id: of the checkpoint; empty: it is none.
    """

    label: str
    tables: Mapping[str, SourceTable]
    settings: Mapping[str, Any]
    seed: int | None
    counts: Counts
    world_size: int
    checkpoint_id: str

    def outline(self, names: frozenset[str]) -> DenseState:
        """The dense part, maybe without values: tensors on the meta device.

        Args:
            names: of the new job's parameters and buffers.

        Raises:
            InputError: it cannot be read.
        """
        ...

    def dense(self, rank: int, names: frozenset[str]) -> DenseState:
        """The dense part as a rank had it; the first rank's, if there was none of that number.

        Args:
            rank: of the new job.
            names: the parameters and buffers that are needed.

        Raises:
            InputError: it cannot be read.
        """
        ...
