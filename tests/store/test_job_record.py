"""The record of a namespace's job."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.job_record import JobRecord

RECORDS = st.builds(
    JobRecord,
    job=st.text(min_size=1),
    has_checkpoints=st.booleans(),
    state=st.sampled_from(["running", "finished", "stopped", "failed"]),
    steps=st.integers(0, 2**40),
    dense_digest=st.text(),
    num_rows=st.none() | st.integers(0, 2**40),
)


@given(record=RECORDS)
def test_a_record_survives_its_fields(record: JobRecord) -> None:
    assert JobRecord.from_fields(record.to_fields()) == record
    assert "\n" not in record.describe().replace(record.job[:8], "").replace(record.dense_digest[:8], "")


@given(fields=st.dictionaries(st.sampled_from(["job", "state", "steps", "rows"]), st.text()))
def test_any_other_fields_are_no_record(fields: dict[str, str]) -> None:
    record = JobRecord.from_fields(fields)
    assert record is None or (record.job, record.state) == (fields["job"], fields["state"])


def test_the_end_of_the_job_is_described() -> None:
    record = JobRecord(job="0123456789abcdef", has_checkpoints=False)
    assert record.describe() == "job 01234567, which has not recorded its end (it still runs, or was killed)"
    ended = JobRecord(job="01234567", has_checkpoints=False, state="stopped", steps=7, dense_digest="ab" * 32)
    assert ended.describe() == "job 01234567, which was interrupted after 7 steps, dense digest abababab"
