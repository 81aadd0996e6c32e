"""`CheckpointSource`: a checkpoint of another job, as what a new job takes from.

manifest ──schema, settings──> tables, counts        row files ──merged chunks──> rows        dense files ──> DenseState
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bagpipe.cache.row_history import RowHistory
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import DenseState, load_of_rank
from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.row_format import split_record
from bagpipe.start_from.job_settings import is_staged
from bagpipe.start_from.source import Counts, Extent, RowChunk, SourceTable
from bagpipe.start_from.tables import hashed_tables
from bagpipe.types.schema import RowSchema, base_optimizer

__all__ = ["CheckpointSource"]
#: Counts of batches that go on from job to job: ``<name>_step`` in `Manifest.origin`.
_COUNTED = ("rows", "schedule", "dense", "masks")


class CheckpointSource:
    """See `bagpipe.start_from.source.Source`.

    Args:
        checkpoint: a valid checkpoint with a dense part.
        label: its name for people.

    Raises:
        InputError: a file is missing or does not match the manifest.
    """

    def __init__(self, checkpoint: Checkpoint, label: str) -> None:
        manifest = checkpoint.manifest
        self.label = label
        self.settings: Mapping[str, Any] = manifest.settings
        self.world_size = len(manifest.parts)
        self.checkpoint_id = manifest.checkpoint_id
        self._checkpoint = checkpoint
        schema = RowSchema.from_json(manifest.row_schema)
        self.seed: int | None = schema.seed
        rows = CheckpointRows(checkpoint.folder, manifest, schema)
        hashed = hashed_tables(manifest.settings)
        history = RowHistory(schema, torch.device("cpu"))
        if history.decaying:
            history.load(self.dense(0, frozenset()).of_part(history.name))
        self.tables: Mapping[str, SourceTable] = {
            table.name: _CheckpointTable(rows, schema, number, hashed.get(table.name), history)
            for number, table in enumerate(schema.tables)
        }
        steps = {name: int(manifest.origin.get(f"{name}_step", 0)) + manifest.step for name in _COUNTED}
        self.counts = Counts(**steps, progress=manifest.parts[0].progress)

    def outline(self, names: frozenset[str]) -> DenseState:
        """See `Source`."""
        return self.dense(0, names)

    def dense(self, rank: int, names: frozenset[str]) -> DenseState:
        """See `Source`. Stages and shares of other ranks are added."""
        entries = [part.dense for part in self._checkpoint.manifest.parts]
        return load_of_rank(self._checkpoint.folder, entries, rank, is_staged=is_staged(self.settings))


class _CheckpointTable:
    """See `SourceTable`."""

    def __init__(
        self, rows: CheckpointRows, schema: RowSchema, number: int, hashed_rows: int | None, history: RowHistory
    ) -> None:
        self.dim = schema.tables[number].dim
        self.dtype = schema.dtype_of(number)
        self.optimizer, self._decays = base_optimizer(schema.optimizer_of(number))
        self._history = history
        self.hashed_rows = hashed_rows
        self._rows = rows
        self._schema = schema
        self._number = number

    def extent(self) -> Extent:
        return Extent(**dict(zip(("num_rows", "least", "largest"), self._rows.extent(self._number), strict=True)))

    def chunks(self) -> Iterator[RowChunk]:
        dtype = TORCH_DTYPE[self.dtype]
        for request in self._rows.rows(self._number):
            records = torch.from_numpy(request.rows).view(dtype)
            if self._decays:
                self._history.catch_up(self._number, records)
                records = records[:, :-1].contiguous()
            weights, state = split_record(records, self._schema, self.dim, self.optimizer)
            yield RowChunk(ids=request.ids, weights=weights, state=state)
