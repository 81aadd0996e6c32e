"""`Claim`: a job's claim on the store's namespace, on one rank.

    take: every rank has its first batch ──> rank 0: rows of another job? ──> recover, adopt or clear the rows
          ──> job record: running ──> every rank writes fenced
    inspect, check_rows, row_check: rows lost or changed? another owner?    finish: job record: finished or interrupted
    on exit: lost or corrupt rows ──> invalidate       refused in a new namespace ──> clear it       else ──> failed

The store is read-only until `take`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from types import TracebackType
from typing import Any, Self

import numpy as np

from bagpipe.checkpoint.adoption import adopt
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.existing_rows import Existing, decide
from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.checkpoint.recovery import Recovered, recover, take_over
from bagpipe.config.sections import StoreConfig
from bagpipe.errors import ChangedRowError, CorruptRowError, FencedError, InputError, LostRowError, StoreError
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.resume_point import ResumePoint, namespace_label
from bagpipe.jobs.row_check import RowCheck, sums_of_checkpoint
from bagpipe.store.audit import stored_sums
from bagpipe.store.fencing.fence import Fence, Ledger, invalidated
from bagpipe.store.interface import Store
from bagpipe.store.job_record import JobRecord
from bagpipe.store.row_sums import RowSums
from bagpipe.util.program import PacedNotes, note

__all__ = ["Claim"]


class Claim:
    """This rank's part of the claim. Enter it before the engine and exit it with the job's error.

    Args:
        namespace: the store's namespace, and what to do with rows of another job.
        ranks: the ranks of the job.
        store: open store.
        resume_point: what the job starts from.
        rows: rows of the checkpoint it resumes from; None without a checkpoint.
        on_adopted: called on rank 0 with the checkpoint that holds another job's rows, if the job adopts them.
        on_taken: called on rank 0 when the claim is taken.
        deletes_rows: rows expire in the job.
        clears_refused: remove the rows of a job that ends with an InputError before its first checkpoint, if the
            namespace was new.

    Attributes:
        ledger: administers the namespace; used by rank 0, entered when the claim is taken.
        continued: the job trains another job's rows on.
        has_begun: the store can have changed; rank 0 only.
        row_check: the check of the store's rows after training; rank 0 uses it.
        has_published: the job has written a checkpoint. Its rows are kept if it is refused later.
    """

    def __init__(
        self,
        namespace: StoreConfig,
        ranks: Ranks,
        store: Store,
        resume_point: ResumePoint,
        *,
        rows: CheckpointRows | None,
        on_adopted: Callable[[Checkpoint], None],
        on_taken: Callable[[], None] = lambda: None,
        deletes_rows: bool = False,
        clears_refused: bool = True,
    ) -> None:
        self.ledger: Ledger = store.ledger()
        self.continued = False
        self.has_begun = False
        self.has_published = False
        self._label = namespace_label(namespace)
        self.row_check = RowCheck(
            self._label, resumed_step=None if resume_point.checkpoint is None else resume_point.first_batch
        )
        self._existing = namespace.existing
        self._audits = namespace.audit
        self._ranks = ranks
        self._store = store
        self._resume_point = resume_point
        self._rows = rows
        self._on_adopted = on_adopted
        self._on_taken = on_taken
        self._clears_refused = clears_refused
        self._stack = ExitStack()
        self._watch: Ledger | None = None
        self._is_suspect = False
        self._is_new = False
        self._has_ended = False
        self._record = JobRecord(
            job=resume_point.lineage or resume_point.token.partition("-")[2],
            has_checkpoints=bool(resume_point.lineage),
            deletes_rows=deletes_rows,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with closing(self._stack):
            if error is None or not self.is_taken:
                return
            if isinstance(error, LostRowError | ChangedRowError):
                self._check_owner(error)
            with suppress(StoreError):  # `error` stays the cause
                self._record_failure(error)

    @property
    def is_taken(self) -> bool:
        return self._watch is not None

    def take(self) -> bool:
        """Collective: take over the namespace and recover the rows of the checkpoint. True if it has no rows."""
        ranks = self._ranks
        ranks.gather(None)
        is_new, self.continued = ranks.share(self._prepare_rows() if ranks.is_first else None)
        self._store.fence(Fence(token=self._resume_point.token, writer=ranks.rank, epoch=1))
        self._watch = self._stack.enter_context(self._store.ledger())
        if ranks.is_first:
            self._on_taken()
        return bool(is_new)

    def inspect(self) -> None:
        """Check the store's servers and the owner of the namespace (`Ledger.inspect`)."""
        assert self._watch is not None, "taken before anything is written"
        try:
            self._watch.inspect()
        except FencedError:
            raise
        except StoreError:
            self._is_suspect = True
            raise

    def check_rows(self, newest: Checkpoint | None) -> None:
        """On rank 0, after training: find rows that the store lost after their last use.

        Args:
            newest: the last checkpoint; None without a folder.

        Raises:
            LostRowError: a row of the last checkpoint is not in the store.
            StoreError: a server has changed, or another job has taken over the namespace.
        """
        if self.is_taken:  # the last inspection may have been many write-backs ago
            self.inspect()
        if newest is None:
            return
        rows = CheckpointRows(newest.folder, newest.manifest, self._store.schema)
        tables = self._store.schema.tables
        for group in self._store.ids_by_table(range(len(tables))):
            for number, ids in group.items():
                missing = np.setdiff1d(rows.ids(number), ids, assume_unique=True)
                if len(missing):
                    raise LostRowError(
                        f"table {tables[number].name} id {missing[0]} was written, but is not in the store any more "
                        f"({len(missing)} such rows at the end)"
                    )

    def num_rows(self) -> int:
        """On rank 0: rows of the namespace. Raises StoreError if the store fails."""
        return sum(state.num_rows for state in self.ledger.state())

    def finish(self, *, steps: int, dense_digest: str, stopped: bool) -> None:
        """On rank 0: record how the job ended. A later error, such as one of the held-out data, changes nothing.

        Raises:
            StoreError: the record cannot be written.
        """
        if self.is_taken:
            self._write_record(
                state="stopped" if stopped else "finished",
                steps=steps,
                dense_digest=dense_digest,
                num_rows=self.num_rows(),
            )
        self._has_ended = True

    def _prepare_rows(self) -> tuple[bool, bool]:
        """On rank 0: own the namespace, with the rows to start from. Returns (it has no rows, another job's rows)."""
        resume_point, store = self._resume_point, self._store
        ledger = self._stack.enter_context(self.ledger)
        existing = decide(
            ledger.state(),
            ledger.job(),
            namespace=self._label,
            lineage=resume_point.lineage,
            existing=self._existing,
            is_trained=resume_point.is_trained,
        )
        self.has_begun = True
        if existing is Existing.RESET or (self._existing == Existing.RESET.value and self._has_other_schema()):
            store.reset(resume_point.token)
        store.claim(reloads=resume_point.checkpoint is not None)
        self._is_new = self._take_over(ledger, existing)
        # Until the namespace was acquired, its previous job could remove the schema record.
        store.claim(reloads=True)
        self._write_record()
        return self._is_new, existing is Existing.ROWS_ONLY

    def _take_over(self, ledger: Ledger, existing: Existing) -> bool:
        """Acquire the namespace and recover or adopt its rows. True if it has no rows."""
        resume_point, store, num_writers = self._resume_point, self._store, self._ranks.world_size
        checkpoint = resume_point.checkpoint
        if checkpoint is None or self._rows is None or resume_point.folder is None:
            is_new = take_over(
                ledger,
                token=resume_point.token,
                num_writers=num_writers,
                existing=self._existing,
                namespace=self._label,
            )
            if is_new:
                self.row_check.first_sums = RowSums(ledger.num_buckets)
            elif self._audits:
                self.row_check.first_sums = stored_sums(store)
            return is_new
        if existing is Existing.ROWS_ONLY:
            # Not the manifest of an earlier start: a kill may have left buckets with its checkpoint id.
            initial = dataclasses.replace(
                checkpoint.manifest, generation=resume_point.generation, token=resume_point.token, base=()
            )
            adopted = adopt(
                store,
                ledger,
                token=resume_point.token,
                folder=resume_point.folder,
                manifest=initial,
                num_writers=num_writers,
            )
            rows = CheckpointRows(adopted.folder, adopted.manifest, store.schema)
            self.row_check.first_sums = rows.sums(ledger.num_buckets)
            self._on_adopted(adopted)
            return False
        first_sums = sums_of_checkpoint(checkpoint.manifest, self._rows, ledger.num_buckets)
        self.row_check.first_sums = first_sums
        done = recover(
            store,
            ledger,
            token=resume_point.token,
            checkpoint=checkpoint.manifest,
            rows=self._rows,
            num_writers=num_writers,
            audit=first_sums if self._audits else None,
            namespace=self._label,
            progress=_ReloadProgress(self._rows.num_records),
        )
        _note_reload(done, ledger.num_buckets)
        return not self._rows.num_records

    def _has_other_schema(self) -> bool:
        try:
            self._store.check(reloads=True)
        except InputError:
            return True
        return False

    def _record_failure(self, error: BaseException) -> None:
        """Invalidate lost or corrupt rows; then remove the rows of a job that was refused, or record the failure."""
        is_suspect = self._is_suspect or isinstance(error, (LostRowError, CorruptRowError, ChangedRowError))
        if is_suspect and self._resume_point.checkpoint_id:
            with self._store.ledger() as ledger:
                ledger.invalidate(invalidated(self._resume_point.checkpoint_id))
        if self._has_ended or not self._ranks.is_first:
            return
        is_refused = isinstance(error, InputError) and self._is_new and not self.has_published
        if is_refused and self._clears_refused:
            self.ledger.clear()
        else:
            self._write_record(state="failed")

    def _write_record(self, **changes: Any) -> None:
        self.ledger.record_job(dataclasses.replace(self._record, **changes))

    def _check_owner(self, error: LostRowError | ChangedRowError) -> None:
        """Raise FencedError instead if another job has taken over the namespace: its recovery deletes rows."""
        try:
            self.inspect()
        except FencedError as fenced:
            raise fenced from error
        except StoreError:
            pass  # the lost row stays the job's error


class _ReloadProgress:
    """Prints the progress of a long reload."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self._notes = PacedNotes()

    def __call__(self, num_rows: int, num_bytes: int) -> None:
        self._notes(
            lambda seconds: (
                f"{num_rows} of at most {self._num_records} rows loaded into the store, "
                f"{num_bytes / seconds / 1e6:.0f} MB/s"
            )
        )


def _note_reload(done: Recovered, num_buckets: int) -> None:
    if done.buckets_changed:
        note(
            f"rows of {done.buckets_changed} of the store's {num_buckets} buckets are not those of the checkpoint, "
            "though no log names them: another program set them back or changed them"
        )
    if done.buckets_reloaded:
        note(
            f"{done.buckets_reloaded} of the store's {num_buckets} buckets were loaded from the checkpoint's files: "
            f"{done.rows_written} rows, {done.bytes_written / 1e6:.0f} MB in {done.seconds:.1f} s"
        )
