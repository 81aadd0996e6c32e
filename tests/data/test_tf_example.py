from __future__ import annotations

import pyarrow as pa
import pytest

from data.tf_example import decode_examples, example_class

COLUMNS = pa.schema(
    [
        ("y", pa.float64()),
        ("ids", pa.list_(pa.int64())),
        ("texts", pa.list_(pa.binary())),
        ("shares", pa.list_(pa.float32())),
    ]
)


def example(**lists: list[int] | list[float] | list[bytes]) -> bytes:
    found = example_class()()
    for name, values in lists.items():
        kind = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[type(values[0])]
        getattr(found.features.feature[name], kind).value.extend(values)
    record: bytes = found.SerializeToString()
    return record


def test_the_wire_format_is_tensorflows() -> None:
    """By hand, from example.proto and feature.proto: {"y": int64_list [1]}; packed and, as old writers do, unpacked."""
    for content in (b"\x0a\x01\x01", b"\x08\x01"):
        feature = b"\x1a" + bytes([len(content)]) + content
        entry = b"\x0a\x01y\x12" + bytes([len(feature)]) + feature
        features = b"\x0a" + bytes([len(entry)]) + entry
        record = b"\x0a" + bytes([len(features)]) + features
        assert decode_examples([record], COLUMNS, stops=True).table.column("y").to_pylist() == [1.0]
    assert example(y=[1]) == b"\x0a\x0c\x0a\x0a\x0a\x01y\x12\x05\x1a\x03\x0a\x01\x01"


def test_lists_become_columns() -> None:
    records = [
        example(y=[0.5], ids=[300, -1], texts=[b"a", b"\xff"], shares=[1, 2], more=[b"x"]),
        example(),
        example(y=[1]),
    ]
    found = decode_examples(records, COLUMNS, stops=True)
    assert found.table.to_pylist() == [
        {"y": 0.5, "ids": [300, -1], "texts": [b"a", b"\xff"], "shares": [1.0, 2.0]},
        {"y": None, "ids": [], "texts": [], "shares": []},
        {"y": 1.0, "ids": [], "texts": [], "shares": []},
    ]
    assert (found.num_raw_rows, found.malformed.size, found.problem) == (3, 0, "")


BAD = [
    (b"no example", "expected a serialized tf.train.Example, got other bytes"),
    (example(ids=[b"a"]), "expected integers in 'ids', got bytes_list"),
    (example(ids=[1.0]), "expected integers in 'ids', got float_list"),
    (example(texts=[1]), "expected strings in 'texts', got int64_list"),
    (example(y=[b"1"]), "expected numbers in 'y', got bytes_list"),
    (example(y=[1, 2]), "expected one of the numbers in 'y', got 2"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_malformed_record_is_explained_or_left_out(record: bytes, message: str) -> None:
    records = [example(y=[1]), record, example(y=[3]), record]
    found = decode_examples(records, COLUMNS, stops=False)
    assert (found.malformed.tolist(), found.num_raw_rows) == ([1, 3], 4)
    assert found.table.column("y").to_pylist() == [1, 3]
    found = decode_examples(records, COLUMNS, stops=True)
    assert (found.malformed.tolist(), found.problem) == ([1], message)
    assert found.table.column("y").to_pylist() == [1]


def test_no_records() -> None:
    assert decode_examples([], COLUMNS, stops=True).table.num_rows == 0
