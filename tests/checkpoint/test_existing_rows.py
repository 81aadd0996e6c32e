"""The use a job makes of the rows that its namespace holds."""

from __future__ import annotations

import pytest

from bagpipe.checkpoint.existing_rows import Existing, decide
from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import BucketState, invalidated
from bagpipe.store.job_record import JobRecord
from tests.checkpoint.samples import LINEAGE

OTHER = LINEAGE[::-1]
PLACE = "store.namespace 'x'"
EMPTY = BucketState()
OURS = BucketState(checkpoint_id=f"{LINEAGE}:3:400", num_rows=5)
THEIRS = BucketState(checkpoint_id=f"{OTHER}:3:400", num_rows=5)
LOOSE = BucketState(num_rows=5)
RECORD = JobRecord(job=OTHER, has_checkpoints=True, state="finished", steps=60, dense_digest="81a15cb0ff")

FOREIGN = [
    pytest.param([THEIRS], LINEAGE, id="another folder's"),
    pytest.param([BucketState(checkpoint_id=invalidated(THEIRS.checkpoint_id))], LINEAGE, id="invalidated"),
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
    for record in (None, RECORD):
        for existing in (Existing.ROWS_ONLY, Existing.RESET):
            assert decide(states, record, namespace=PLACE, lineage=lineage, existing=existing.value) is existing


def test_a_trained_checkpoint_does_not_go_with_another_jobs_rows() -> None:
    def choose(existing: str) -> Existing:
        return decide([THEIRS], None, namespace=PLACE, lineage=LINEAGE, existing=existing, is_trained=True)

    assert choose("reset") is Existing.RESET
    with pytest.raises(InputError, match=r"rows of an unknown job: .* set store.existing to reset \(delete them\), or"):
        choose("rows-only")
