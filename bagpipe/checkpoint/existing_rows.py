"""`decide`: the use a job makes of the rows that its namespace holds. Pure.

bucket states, job record, lineage ──decide──> own         no rows, or rows of the job's own checkpoints
                                               rows-only   another job's rows, trained on with a fresh dense part
                                               reset       another job's rows, removed
                                               InputError  another job's rows, and the user chose neither
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import BucketState
from bagpipe.store.fencing.presence import check_present
from bagpipe.store.job_record import JobRecord

__all__ = ["Existing", "decide", "is_foreign"]


class Existing(Enum):
    """Use of a namespace's rows. The values are those of `store.existing`, but for `OWN`."""

    OWN = "own"
    ROWS_ONLY = "rows-only"
    RESET = "reset"


def is_foreign(state: BucketState, record: JobRecord | None, lineage: str) -> bool:
    """Whether a bucket belongs to another job.

    Args:
        state: state of the bucket.
        record: record of the namespace's job.
        lineage: lineage of this job's checkpoints; empty for a job without checkpoints, to which no rows belong.
    """
    theirs = state.checkpoint_id.partition(":")[0]
    if not theirs and record is not None and record.job == lineage:
        return False  # the store has lost the checkpoint id
    return theirs != lineage if theirs else state.num_rows > 0


def decide(
    states: Sequence[BucketState],
    record: JobRecord | None,
    *,
    namespace: str,
    lineage: str,
    existing: str,
    is_trained: bool = False,
) -> Existing:
    """Use that this job makes of the namespace's rows.

    Args:
        states: `Ledger.state`.
        record: `Ledger.job`.
        namespace: name of the namespace in error messages.
        lineage: as in `is_foreign`.
        existing: `store.existing`: refuse, rows-only or reset.
        is_trained: the job resumes a checkpoint with trained rows.

    Raises:
        InputError: the rows belong to another job, and `existing` is refuse; or it is rows-only, but the job's
            checkpoint has rows of its own. The message names the job, its end and the ways out.
        StoreError: another job's rows are to be trained on, and some of them, or what lies beside them, are gone.
    """
    foreign = [state for state in states if is_foreign(state, record, lineage)]
    is_theirs = record is not None and record.job != lineage and bool(record.num_rows)
    if existing == Existing.ROWS_ONLY.value and (foreign or is_theirs) and not is_trained:
        check_present(states, record, namespace=namespace)
    if not foreign:
        return Existing.OWN
    if existing == Existing.RESET.value:
        return Existing.RESET
    if existing == Existing.ROWS_ONLY.value and not is_trained:
        return Existing.ROWS_ONLY
    owner = "an unknown job" if record is None else record.describe()
    resume = ""
    if any(state.checkpoint_id for state in foreign):
        resume = "name the folder of its checkpoints with checkpoint.dir, "
    rows_only = "rows-only (train them with a fresh dense part) or "
    if is_trained:
        rows_only = ""
    raise InputError(
        f"{namespace} holds {sum(state.num_rows for state in states)} rows of {owner}: {resume}set store.existing to "
        f"{rows_only}reset (delete them), or use another store.namespace"
    )
