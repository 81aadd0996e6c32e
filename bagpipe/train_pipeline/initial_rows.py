"""`InitialRows`: rows that a job begins with, written to the store when it claims the namespace.

    load_rows, import_weights ──RowChunks──> held ──first batch──> claim ──rank 0: write──> store, journal, row sums
                                                                        ──all ranks wait──> the first fetch

They are fenced, and recorded as rows that leave the cache are: the first checkpoint holds them. A job that resumes
trained rows has its own, and leaves them out.
"""

from __future__ import annotations

import dataclasses

from bagpipe.cache.row_cache import RowCache
from bagpipe.errors import InputError
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.ranks import Ranks
from bagpipe.store.interface import Store
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.row_sources import RowChunks, TensorRows
from bagpipe.util.program import note

__all__ = ["InitialRows"]


class InitialRows:
    """The sources of one job, in order: a later one replaces rows of an earlier one."""

    def __init__(self) -> None:
        self._sources: list[RowChunks] = []
        self._is_over = False

    @classmethod
    def of(cls, model: ModelParts) -> InitialRows:
        """The weights that the model's collections had."""
        rows = cls()
        rows._sources.extend(TensorRows(model.rows, table, None, weights) for table, weights in model.held.items())
        return rows

    @property
    def is_pending(self) -> bool:
        """There are rows that are not written yet."""
        return bool(self._sources)

    def add(self, source: RowChunks, step: int) -> None:
        """Add rows.

        Args:
            source: the rows.
            step: batches trained.

        Raises:
            InputError: the namespace is claimed already.
        """
        if self._is_over:
            raise InputError(f"rows are loaded before the first batch and evaluation, got some at step {step}")
        self._sources.append(source)
        self.drop_at(step)

    def drop_at(self, step: int) -> None:
        """Leave the rows out and say so, if the job goes on from a step with rows of its own."""
        if self._sources and step:
            self._sources.clear()
            note(f"rows to load are left out: the job goes on from step {step} with rows of its own")

    def claim(self, ranks: Ranks, store: Store, checkpoints: Checkpoints, cache: RowCache) -> bool:
        """Collective: claim the namespace, and write the rows. Does nothing if it is claimed.

        Returns:
            Whether this call has claimed it, and it has no rows.

        Raises:
            InputError: the rows would replace those of another job, or a source cannot be read.
            StoreError: the store failed.
        """
        claim = checkpoints.claim
        if claim.is_taken:
            return False
        is_new, self._is_over = claim.take(), True
        self.drop_at(checkpoints.first_batch)
        if claim.continued and self.is_pending:
            raise InputError(
                "expected no rows to load where rows of another job are trained on, which they would replace: load "
                "none, or set store.existing = reset"
            )
        num_rows = self._write(store, checkpoints, cache) if ranks.is_first else 0
        self._sources.clear()
        return not ranks.share(num_rows) and is_new

    def _write(self, store: Store, checkpoints: Checkpoints, cache: RowCache) -> int:
        """Write all rows. Returns their number."""
        recorder, epoch, step = checkpoints.recorder, cache.snapshot.epoch, checkpoints.first_batch
        num_rows = 0
        for source in self._sources:
            for request in source.requests():
                # The namespace has no rows of others, but maybe those of an earlier source.
                checks = store.read(request.table, request.ids).checks
                recorder.before_write(epoch)
                written = [dataclasses.replace(request, replaced=checks)]
                store.write_many(written)
                recorder.after_write(written, epoch, step)
                num_rows += len(request.ids)
        return num_rows
