"""`RowCheck`: compares the store's rows with the rows that the job wrote. Rank 0 uses it.

claim   checkpoint, new namespace, or an audit ──> first_sums
end     first_sums + changes of all ranks ──compare──> sums of the store's rows
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.manifest import Manifest
from bagpipe.errors import ChangedRowError
from bagpipe.store.row_sums import RowSums

__all__ = ["RowCheck", "sums_of_checkpoint"]

#: Buckets that an error names.
_MAX_NAMED = 8


class RowCheck:
    """The check of one job.

    Args:
        namespace: name of the namespace in errors.
        resumed_step: step of the checkpoint that the job starts from; None: the job makes no checkpoints.

    Attributes:
        first_sums: sums of the store's rows before training; None: not known, nothing is compared.
    """

    def __init__(self, namespace: str, *, resumed_step: int | None) -> None:
        self.first_sums: RowSums | None = None
        self._namespace = namespace
        self._resumed_step = resumed_step

    def compare(self, stored: RowSums, changes: Sequence[RowSums]) -> None:
        """Find rows that were not the last ones written, when they were read or at the end.

        Args:
            stored: sums of the store's rows.
            changes: `Store.sum_changes` of every rank.

        Raises:
            ChangedRowError: there are such rows.
        """
        if self.first_sums is None:
            return
        differing = stored.differing(sum(changes, self.first_sums)).tolist()
        if not differing:
            return
        named = ", ".join(map(str, differing[:_MAX_NAMED])) + (", ..." if len(differing) > _MAX_NAMED else "")
        way_out = "train anew, in another store.namespace"
        if self._resumed_step is not None:
            way_out = (
                f"checkpoints after step {self._resumed_step} may hold rows trained from these; started again, the job "
                "resumes from the newest one that does not, and loads all rows from its files"
            )
        raise ChangedRowError(
            f"{self._namespace}: {len(differing)} of {stored.num_buckets} buckets ({named}) do not hold the rows last "
            f"written to them: another program set rows back, changed or removed them; {way_out}"
        )


def sums_of_checkpoint(manifest: Manifest, rows: CheckpointRows, num_buckets: int) -> RowSums:
    """Sums of the rows of a checkpoint, which were compared with the manifest's when it was chosen."""
    if len(manifest.row_sums) == num_buckets:
        return RowSums.of(manifest.row_sums) + rows.dirty_sums(num_buckets)
    return rows.sums(num_buckets)
