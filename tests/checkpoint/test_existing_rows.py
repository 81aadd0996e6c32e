"""The use a job makes of the rows that its namespace holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagpipe.checkpoint.existing_rows import Existing, decide
from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import BucketState, LogState, invalidated
from bagpipe.store.job_record import JobRecord
from tests.checkpoint.samples import LINEAGE

OTHER = LINEAGE[::-1]
PLACE = "store.namespace 'x'"
EMPTY = BucketState()
OURS = BucketState(checkpoint_id=f"{LINEAGE}:3:400", num_rows=5)
THEIRS = BucketState(checkpoint_id=f"{OTHER}:3:400", num_rows=5)
LOOSE = BucketState(num_rows=5)
RECORD = JobRecord(job=OTHER, has_checkpoints=True, state="finished", steps=60, dense_digest="81a15cb0ff")


def whole(states: list[BucketState]) -> list[BucketState]:
    """The states with an owner and a log."""
    logs = (LogState(token="3-a", epoch=1, writer=0, num_groups=1),)
    return [replace(state, owner="3-a", logs=logs) for state in states]


FOREIGN = [
    pytest.param([THEIRS], LINEAGE, id="another folder's"),
    pytest.param([BucketState(checkpoint_id=invalidated(THEIRS.checkpoint_id), num_rows=5)], LINEAGE, id="invalidated"),
    pytest.param([EMPTY, THEIRS], "", id="a folder's, ours has none"),
    pytest.param([EMPTY, LOOSE], LINEAGE, id="no folder's, ours has one"),
    pytest.param([LOOSE], "", id="no folder's"),
    pytest.param([OURS, THEIRS], LINEAGE, id="some another's"),
]


@pytest.mark.parametrize("existing", ["refuse", "rows-only", "reset"])
@pytest.mark.parametrize("lineage", ["", LINEAGE])
def test_no_rows_and_own_rows_are_used_as_they_are(existing: str, lineage: str) -> None:
    own = [EMPTY, OURS, BucketState(checkpoint_id=invalidated(OURS.checkpoint_id), num_rows=1)] if lineage else [EMPTY]
    for record in (None, RECORD):
        assert decide(own, record, namespace=PLACE, lineage=lineage, existing=existing) is Existing.OWN


def test_rows_to_train_on_must_be_there() -> None:
    """A job that is told to train another job's rows on does not begin with new ones instead."""
    record = replace(RECORD, num_rows=6)
    for states in ([EMPTY], [LOOSE], [THEIRS], whole([THEIRS])):
        with pytest.raises(StoreError, match=r"^store\.namespace 'x' has lost its data: [^\n]*$"):
            decide(states, record, namespace=PLACE, lineage="", existing="rows-only")
        assert decide([EMPTY], record, namespace=PLACE, lineage=record.job, existing="rows-only") is Existing.OWN
    assert decide(whole([THEIRS]), replace(record, num_rows=5), namespace=PLACE, lineage="", existing="rows-only")
    assert decide([EMPTY], record, namespace=PLACE, lineage="", existing="refuse") is Existing.OWN


@pytest.mark.parametrize(
    ("changes", "record", "lost"),
    [
        ({}, None, "it has no record of its job"),
        ({"owner": "", "num_rows": 0}, RECORD, "the owner of bucket 1 is gone"),
        ({"logs": (), "num_rows": 0}, RECORD, "the logs of bucket 1 are gone"),
        ({"logs": (LogState(token="3-a", epoch=1, writer=0, num_groups=-1),)}, RECORD, "a log of bucket 1 is gone"),
    ],
)
def test_a_namespace_with_a_loss_is_not_trained_on(
    changes: dict[str, Any], record: JobRecord | None, lost: str
) -> None:
    """Whether its job counted its rows or not: those of a bucket may be gone with what is missing."""
    states = whole([THEIRS, THEIRS])
    states[1] = replace(states[1], **changes)
    with pytest.raises(StoreError, match=rf"^store\.namespace 'x' has lost its data: {lost}"):
        decide(states, record, namespace=PLACE, lineage="", existing="rows-only")
    assert decide(states, record, namespace=PLACE, lineage="", existing="reset") is Existing.RESET


def test_own_rows_whose_checkpoint_id_is_lost_stay_own() -> None:
    record = JobRecord(job=LINEAGE, has_checkpoints=True)
    assert decide([EMPTY, LOOSE], record, namespace=PLACE, lineage=LINEAGE, existing="refuse") is Existing.OWN


@pytest.mark.parametrize(("states", "lineage"), FOREIGN)
def test_rows_of_another_job_are_refused(states: list[BucketState], lineage: str) -> None:
    with pytest.raises(InputError) as caught:
        decide(states, RECORD, namespace=PLACE, lineage=lineage, existing="refuse")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{PLACE} holds {sum(state.num_rows for state in states)} rows of job {OTHER[:8]}, ")
    assert "finished after 60 steps, dense digest 81a15cb0" in message
    for way in ("rows-only", "reset", "another store.namespace"):
        assert way in message
    assert ("checkpoint.dir" in message) == (THEIRS in states or bool(states[0].checkpoint_id))


@pytest.mark.parametrize(("states", "lineage"), FOREIGN)
def test_the_user_chooses_what_becomes_of_another_jobs_rows(states: list[BucketState], lineage: str) -> None:
    for found, record in ((states, None), (whole(states), RECORD)):
        for existing in (Existing.ROWS_ONLY, Existing.RESET):
            assert decide(found, record, namespace=PLACE, lineage=lineage, existing=existing.value) is existing


def test_a_trained_checkpoint_does_not_go_with_another_jobs_rows() -> None:
    def choose(existing: str) -> Existing:
        return decide([THEIRS], None, namespace=PLACE, lineage=LINEAGE, existing=existing, is_trained=True)

    assert choose("reset") is Existing.RESET
    with pytest.raises(InputError, match=r"rows of an unknown job: .* set store.existing to reset \(delete them\), or"):
        choose("rows-only")
