from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import csv_lines
from data.arrow_columns import ArrowBlock
from data.csv_layout import CsvLayout
from data.csv_lines import ID, parse_lines
from tests.effort import at_most

NAMES = ("y", "junk", "id", "text")
TYPES = {"y": pa.float64(), "id": ID, "text": pa.binary()}


COMMAS = CsvLayout()


def parse(text: bytes, *, stops: bool = False, form: CsvLayout = COMMAS) -> ArrowBlock:
    return parse_lines(text, NAMES, TYPES, form, stops=stops)


def test_values_have_the_types_of_their_columns() -> None:
    found = parse(b'1,,7,a\n-.5,x,-1,"b, ""c"""\n,,,\n1e3,, 3,\xff\r\n')
    assert found.table.to_pydict() == {
        "y": [1.0, -0.5, None, 1000.0],
        "id": [7, -1, None, 3],
        "text": [b"a", b'b, "c"', None, b"\xff"],
    }
    assert (found.num_raw_rows, found.malformed.size, found.problem) == (4, 0, "")


def test_ids_of_2_to_63_and_more_have_the_bits_of_signed_ones() -> None:
    found = parse(f"1,,{2**63},a\n1,,7,b\n1,,,c\n1,,{2**64 - 1},d\n1,,-{2**63},e\n".encode())
    assert found.table.column("id").to_pylist() == [-(2**63), 7, None, -1, -(2**63)]
    assert found.malformed.size == 0
    number = parse_lines(f"{2**63}\n".encode(), ("y",), {"y": pa.int64()}, COMMAS, stops=True)
    assert number.problem == f"expected an integer in column 'y', got '{2**63}'", "a number has no other value"


def test_texts_of_missing_values_can_be_named() -> None:
    found = parse(b"NA,,NA,NA\n", form=CsvLayout(null=("NA",)))
    assert found.table.to_pydict() == {"y": [None], "id": [None], "text": [None]}


def test_quotes_can_have_no_meaning() -> None:
    assert parse(b'1,,2,"a\n', form=CsvLayout(quote="")).table.column("text").to_pylist() == [b'"a']


BAD = [
    (b"1,,2", "expected 4 columns separated by ',', got 3"),
    (b"1,,2,a,b", "expected 4 columns separated by ',', got 5"),
    (b"x,,2,a", "expected a number in column 'y', got 'x'"),
    (b"1,,2.5,a", "expected an integer in column 'id', got '2.5'"),
    (b"1,,18446744073709551616,a", "expected an integer in column 'id', got '18446744073709551616'"),
    (b"1,,-9223372036854775809,a", "expected an integer in column 'id', got '-9223372036854775809'"),
    (b"1,,\xff,a", "expected an integer in column 'id', got '\\\\xff'"),
    (b'1,,2,"a', "expected quotes that end in the same line, got an open one"),
    (b'"1,,2,a', "expected 4 columns separated by ',', got 1"),
    (b"1,,2,a\0b", "expected text, got a NUL at byte 7 of the line"),
    (b"1,,2,a\rb", "expected text, got a carriage return at byte 7 of the line"),
    (b"1,,2,a\r", None),
    (b'1,a"b,2,"c', "expected quotes that end in the same line, got an open one"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_malformed_line_is_explained_or_left_out(line: bytes, message: str | None, place: int) -> None:
    good = [b"1,,7,a", b"0,,8,b"]
    text = b"".join(item + b"\n" for item in [*good[:place], line, *good[place:]])
    found = parse(text)
    if message is None:
        assert found.malformed.size == 0
        return
    assert found.malformed.tolist() == [place]
    assert found.table.column("id").to_pylist() == [7, 8]
    stopped = parse(text, stops=True)
    assert (stopped.malformed.tolist(), stopped.problem) == ([place], message)
    assert stopped.table.column("id").to_pylist() == [7, 8][:place]
    assert stopped.raw_rows.tolist() == list(range(place))


LINES = [line for line, _ in BAD] + [
    b"",
    b",",
    b'"',
    b'a"b,"c',
    b"\t1 ,,\t2,",
    b"0x1F,,0x1F,",
    b"nan,,inf,",
    b"+1,,+1,",
    b"1,,9223372036854775807,",
    b"1,, 9223372036854775808,",
    b"1,,18446744073709551615 ,a",
    b"1,,-9223372036854775808,a",
    b"1,,  ,a",
    b'1,,"-0000000000000000000000009",a',
]


@at_most(50)
@given(st.lists(st.sampled_from([b"1,,7,a", b"0,x,8,b", *LINES]), min_size=1, max_size=30))
def test_a_line_is_malformed_if_and_only_if_it_is_alone(lines: list[bytes]) -> None:
    alone = [parse(line + b"\n") for line in lines]
    together = parse(b"".join(line + b"\n" for line in lines))
    bad = [number for number, found in enumerate(alone) if found.malformed.size]
    assert together.malformed.tolist() == bad
    assert together.table.equals(pa.concat_tables([found.table for found in alone]).combine_chunks())
    assert np.array_equal(together.raw_rows, np.delete(np.arange(len(lines)), bad))


def test_a_file_of_one_column() -> None:
    found = parse_lines(b"1\n\nx\n2\n", ("y",), {"y": pa.int64()}, CsvLayout(), stops=False)
    assert found.table.column("y").to_pylist() == [1, None, 2]
    assert found.malformed.tolist() == [2]


def test_lines_with_open_quotes_take_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_lines, "_MAX_TRIED", 0)
    found = parse(b'1,,2,"a\n1,,x,a\n1,,2,a\n1,a"b,2,"c\n' * 20_000)
    assert found.malformed.size == 60_000
    assert found.table.num_rows == 20_000


def arrow_accepts(line: str) -> bool:
    """Whether Arrow's parser alone takes a line as one row of two values."""
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(f"{line}\n,\n".encode()),
            read_options=pa.csv.ReadOptions(use_threads=False, column_names=["x", "y"]),
            parse_options=pa.csv.ParseOptions(ignore_empty_lines=False),
        )
    except pa.ArrowInvalid:
        return False
    return bool(table.num_rows == 2)


@at_most(200)
@given(st.lists(st.text(alphabet='",,a ', max_size=8), min_size=1, max_size=8))
def test_lines_of_quotes_are_those_that_the_parser_refuses(lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_lines, "_MAX_TRIED", 0)
        found = parse_lines(text, ("x", "y"), {"x": pa.binary(), "y": pa.binary()}, COMMAS, stops=False)
    assert found.problem == ""
    assert found.malformed.tolist() == [number for number, line in enumerate(lines) if not arrow_accepts(line)]


def test_lines_that_take_a_trial_each_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_lines, "_MAX_TRIED", 5)
    long = b'1,,2,"' + b"a" * 140_000 + b"\n"  # longer than the values that the search for open quotes reads
    few, many = (long + b"1,,2,a\n") * 5, b"1,,2,a\n" + long * 50
    assert parse(few).malformed.tolist() == [0, 2, 4, 6, 8]
    found = parse(many)
    assert (found.malformed.tolist(), found.num_raw_rows) == ([1], 51)
    assert found.problem == "expected at most 5 lines that are malformed in unusual ways in a block, got more"
    stopped = parse(many, stops=True)
    assert stopped.malformed.tolist() == [1]
    assert stopped.problem == "expected quotes that end in the same line, got an open one"
