"""`BatchUses`: from distances in examples to the numbers of batches.

    place of an example in its epoch + distance ──in this epoch──> batch of that place
                                                └─beyond────────> batch of the place in the next epoch

Training can serve fewer rows than were annotated (`data.limit`, `data.eval_fraction`). A next use among the rows that
it leaves out is then none, although the row may be used in the next epoch: evictions are not the best ones there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.batch import NO_USE, Batch
from data.next_use_sort import FAR

__all__ = ["BatchUses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUses:
    """The batches of a training, of which the last one of an epoch can be smaller.

    Attributes:
        cycle: rows of an epoch, as annotated.
        rows: rows of an epoch, as trained.
        batch_size: examples in a batch.
        epochs: passes over the rows.
    """

    cycle: int
    rows: int
    batch_size: int
    epochs: int

    def of(self, batch: Batch, epoch: int, distances: NDArray[np.uint32]) -> NDArray[np.int32]:
        """int32 ``[num_occurrences]``: `Batch.next_use`.

        Args:
            batch: of this epoch.
            epoch: from 0.
            distances: uint32 ``[num_occurrences]``: examples up to the next use, `FAR` for none.
        """
        per_epoch = -(-self.rows // self.batch_size)
        first_batch = epoch * per_epoch
        start = (batch.index - first_batch) * self.batch_size
        places = np.arange(start, start + batch.num_examples, dtype=np.int64)
        if batch.is_one_hot:
            places = (distances.reshape(batch.num_features, -1) + places).reshape(-1)
        else:
            places = np.tile(places, batch.num_features).repeat(batch.lengths.reshape(-1)) + distances
        # Truncation of most places is a division by a constant, so one pass serves both epochs.
        is_next = places >= self.cycle
        if epoch + 1 < self.epochs:
            places -= is_next * np.int64(self.cycle)
            found = places // self.batch_size
            found += first_batch + is_next * np.int64(per_epoch)
            found[places >= self.rows] = NO_USE
        else:
            found = places // self.batch_size
            found += first_batch
            found[is_next | (places >= self.rows)] = NO_USE
        found[distances == FAR] = NO_USE
        return np.minimum(found, NO_USE).astype(np.int32)
