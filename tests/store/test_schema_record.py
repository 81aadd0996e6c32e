from __future__ import annotations

import dataclasses

import pytest

from bagpipe.errors import InputError
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=8), RowTable(name="item", dim=4, rows=10)), optimizer="adam")
RECORD = SchemaRecord(schema=SCHEMA, num_buckets=16, num_servers=2, server=1)


def test_a_record_equals_itself() -> None:
    RECORD.compare(RECORD.to_fields(), "here")


def test_fields_read_plainly() -> None:
    fields = RECORD.to_fields()
    assert {name: fields[name] for name in ("format", "buckets", "servers", "server")} == {
        "format": "2",
        "buckets": "16",
        "servers": "2",
        "server": "1",
    }
    assert '"optimizer": "adam"' in fields["schema"]
    assert fields["digest"] == SCHEMA.digest()


WAYS_OUT = ": use another store.namespace, or delete its rows with store.existing=reset"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dataclasses.replace(RECORD, num_buckets=32), "here was made with store.buckets '32', this job has '16'"),
        (
            dataclasses.replace(RECORD, schema=dataclasses.replace(SCHEMA, seed=9)),
            "here was made with seed 9, this job has 0",
        ),
        (
            dataclasses.replace(RECORD, schema=dataclasses.replace(SCHEMA, tables=SCHEMA.tables[:1])),
            "here was made with tables ['user'], this job has ['user', 'item']",
        ),
        (
            dataclasses.replace(
                RECORD,
                schema=dataclasses.replace(SCHEMA, tables=(SCHEMA.tables[0], RowTable(name="item", dim=4, rows=11))),
            ),
            "here was made with table 'item' rows 11, this job has 10",
        ),
        (
            dataclasses.replace(
                RECORD,
                schema=dataclasses.replace(
                    SCHEMA, tables=(RowTable(name="user", dim=8, optimizer="frozen"), SCHEMA.tables[1])
                ),
            ),
            "here was made with table 'user' optimizer 'frozen', this job has 'adam'",
        ),
        (
            dataclasses.replace(
                RECORD,
                schema=dataclasses.replace(
                    SCHEMA, tables=(SCHEMA.tables[0], dataclasses.replace(SCHEMA.tables[1], dtype="float16"))
                ),
            ),
            "here was made with table 'item' dtype 'float16', this job has 'float32'",
        ),
    ],
)
def test_the_first_difference_is_named_with_both_values(other: SchemaRecord, message: str) -> None:
    with pytest.raises(InputError) as caught:
        RECORD.compare(other.to_fields(), "here")
    assert str(caught.value) == message + WAYS_OUT
    RECORD.compare_place(other.to_fields(), "here")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dataclasses.replace(RECORD, num_servers=3), "here was made with number of servers '3', this job has '2'"),
        (dataclasses.replace(RECORD, server=0), "here was made with server position '0', this job has '1'"),
        (dataclasses.replace(RECORD, format_version=1), "here was made with format version '1', this job has '2'"),
    ],
)
def test_rows_in_another_place_are_refused(other: SchemaRecord, message: str) -> None:
    for compare in (RECORD.compare, RECORD.compare_place):
        with pytest.raises(InputError) as caught:
            compare(other.to_fields(), "here")
        assert str(caught.value) == message


@pytest.mark.parametrize("buckets", ["", "0", "65537", "-1", "x"])
def test_a_record_without_a_valid_number_of_buckets_is_refused(buckets: str) -> None:
    assert SchemaRecord.num_buckets_of(RECORD.to_fields(), "here") == 16
    with pytest.raises(InputError, match=f"store.buckets '{buckets}', expected 1 to 65536"):
        SchemaRecord.num_buckets_of({"buckets": buckets}, "here")


@pytest.mark.parametrize("change", [{"schema": "{"}, {"schema": "[]"}, {"digest": "0"}, {"schema": "{}"}])
def test_a_damaged_record_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(InputError, match="here"):
        RECORD.compare(RECORD.to_fields() | change, "here")


def test_a_missing_field_is_refused() -> None:
    fields = RECORD.to_fields()
    del fields["buckets"]
    with pytest.raises(InputError, match=r"store\.buckets None, this job has '16'"):
        RECORD.compare(fields, "here")
