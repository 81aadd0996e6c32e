"""`check_present`: whether a namespace still has what its records tell of. Pure: bucket states and a job record in.

    schema record, no job record, no owner, no rows            only the schema record survived
    job record or owners ──> every bucket has an owner and its logs; the rows that a job counted at its end are there

For readers, who would otherwise take the rows that are gone for rows that were never trained. A namespace that was
written without a ledger has neither owners nor a job record, and only its rows are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.errors import StoreError
from bagpipe.store.fencing.fence import BucketState
from bagpipe.store.job_record import JobRecord

__all__ = ["check_present", "missing_part"]


def missing_part(states: Sequence[BucketState], record: JobRecord | None) -> str:
    """What is gone, for messages; empty if nothing is known to be.

    Args:
        states: of all buckets.
        record: of the namespace's job; None: there is none.
    """
    num_rows = sum(state.num_rows for state in states)
    if record is None and not any(state.owner for state in states):
        return "" if num_rows else "it has a schema record, but no rows, no logs and no record of a job"
    if record is None:
        return (
            "it has no record of its job, which is gone, or still takes the namespace over: its rows are not complete"
        )
    for bucket, state in enumerate(states):
        if not state.owner or not state.logs:
            return f"the {'logs' if state.owner else 'owner'} of bucket {bucket} {'are' if state.owner else 'is'} gone"
        lost = next((log for log in state.logs if log.num_groups < 0), None)
        if lost is not None:
            return f"a log of bucket {bucket} is gone: epoch {lost.epoch} of writer {lost.writer}"
    if record.num_rows is not None:
        is_short = num_rows < record.num_rows
        return f"it has {num_rows} rows, expected the {record.num_rows} of {record.describe()}" if is_short else ""
    num_groups = sum(log.num_groups for state in states for log in state.logs)
    if num_groups and not num_rows and record.deletes_rows is False:
        return f"it has no rows, but logs of {num_groups} groups of rows"
    return ""


def check_present(states: Sequence[BucketState], record: JobRecord | None, *, namespace: str) -> None:
    """Raise StoreError if something is gone. `namespace`: its name in the message. See `missing_part`."""
    if missing := missing_part(states, record):
        raise StoreError(f"{namespace} has lost its data: {missing}")
