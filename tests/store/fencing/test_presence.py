"""What a reader can know to be gone from a namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.errors import StoreError
from bagpipe.store.fencing.fence import BucketState, LogState
from bagpipe.store.fencing.presence import check_present, missing_part
from bagpipe.store.job_record import JobRecord

TOKEN = "1-" + "0" * 32
LOG = LogState(token=TOKEN, epoch=1, writer=0, num_groups=0)
WRITTEN = replace(LOG, num_groups=3)
NEW = BucketState(owner=TOKEN, logs=(LOG,))
FULL = BucketState(owner=TOKEN, logs=(WRITTEN,), num_rows=5)
DELETED = replace(FULL, num_rows=0)
RUNNING = JobRecord(job="a" * 32, has_checkpoints=False, deletes_rows=False)
ENDED = replace(RUNNING, state="finished", steps=9, num_rows=10)


@pytest.mark.parametrize(
    ("states", "record"),
    [
        pytest.param([NEW, NEW], RUNNING, id="a job that has written nothing"),
        pytest.param([NEW, FULL], RUNNING, id="a job that runs"),
        pytest.param([FULL, FULL], ENDED, id="a job that has ended"),
        pytest.param([FULL, FULL, FULL], ENDED, id="more rows than it had"),
        pytest.param([NEW, NEW], replace(ENDED, num_rows=0), id="a job that ended without rows"),
        pytest.param([NEW, FULL], replace(ENDED, num_rows=None), id="a job of an earlier release"),
        pytest.param([DELETED, NEW], replace(RUNNING, deletes_rows=True), id="a job that has only deleted rows"),
        pytest.param([DELETED, NEW], replace(RUNNING, deletes_rows=None), id="one of an earlier release that has"),
        pytest.param([DELETED, NEW], replace(ENDED, num_rows=0), id="a job whose rows have all expired"),
        pytest.param([BucketState(num_rows=4), BucketState()], None, id="rows that were written without a ledger"),
    ],
)
def test_what_a_job_leaves_is_whole(states: list[BucketState], record: JobRecord | None) -> None:
    assert missing_part(states, record) == ""
    check_present(states, record, namespace="namespace 'x'")


@pytest.mark.parametrize(
    ("states", "record", "line"),
    [
        ([BucketState()] * 2, None, "it has a schema record, but no rows, no logs and no record of a job"),
        ([BucketState()] * 2, RUNNING, "the owner of bucket 0 is gone"),
        (
            [FULL, FULL],
            None,
            "it has no record of its job, which is gone, or still takes the namespace over: its rows are not complete",
        ),
        ([FULL, replace(FULL, owner="")], ENDED, "the owner of bucket 1 is gone"),
        ([FULL, replace(FULL, logs=())], ENDED, "the logs of bucket 1 are gone"),
        (
            [FULL, replace(FULL, logs=(replace(LOG, num_groups=-1),))],
            RUNNING,
            "a log of bucket 1 is gone: epoch 1 of writer 0",
        ),
        ([FULL, NEW], ENDED, "it has 5 rows, expected the 10 of job aaaaaaaa, which finished after 9 steps"),
        ([replace(FULL, num_rows=0), NEW], RUNNING, "it has no rows, but logs of 3 groups of rows"),
    ],
)
def test_what_is_gone_is_named(states: list[BucketState], record: JobRecord | None, line: str) -> None:
    with pytest.raises(StoreError) as caught:
        check_present(states, record, namespace="namespace 'x'")
    assert str(caught.value) == f"namespace 'x' has lost its data: {line}"
