from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.delimited import Column, DelimitedFile, Kind, explain_line, find_columns, split_fields

NUMBER = Kind(words="a number", pattern=re.compile(rb"-?[0-9]{1,16}"))
COLUMNS = (Column(name="a", kind=NUMBER, required=True), Column(name="b", kind=NUMBER))


@pytest.mark.parametrize(
    "line", ["a,b\n", "a,b", "b,a\r\n", "c,b,d,a\n", '"a","b"\n', "\ufeffa,b\n", " b , a \n"], ids=repr
)
def test_columns_are_found_by_name(line: str) -> None:
    file = find_columns("x.csv", line.encode(), ",", COLUMNS)
    names = [name.strip(' \ufeff"\r\n') for name in line.split(",")]
    assert file == DelimitedFile(path="x.csv", num_columns=len(names), positions=(names.index("a"), names.index("b")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a,c\n", "x.csv:1: expected a header with a column 'b', got none in 'a,c'"),
        (b"a,b,b\n", "x.csv:1: expected a header with a column 'b', got several in 'a,b,b'"),
        (b"\xff\xfe1,2\n", "x.csv:1: expected a header with a column 'a', got none in '\\\\xff\\\\xfe1,2'"),
        (b"c" * 500, f"got none in '{'c' * 120}…'"),
    ],
)
def test_a_header_without_a_column_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        find_columns("x.csv", line, ",", COLUMNS)


@given(st.lists(st.text("01,\t\r\0", max_size=8), min_size=1, max_size=20), st.sampled_from(",\t"))
def test_lines_with_the_right_number_of_columns_are_split(lines: list[str], separator: str) -> None:
    text = "".join(line + "\n" for line in lines).encode()
    fields = split_fields(text, separator.encode(), 2)
    assert fields.num_lines == len(lines)
    good = [n for n, line in enumerate(lines) if line.count(separator) == 1 and "\0" not in line]
    assert fields.lines.tolist() == good
    for row, number in enumerate(good):
        expected = lines[number].removesuffix("\r").encode().split(separator.encode())
        ends, widths = fields.ends[:, row], fields.widths[:, row]
        assert [text[end - width : end] for end, width in zip(ends, widths, strict=True)] == expected


@given(st.lists(st.text("12-x,\0", max_size=6), min_size=1, max_size=20))
def test_a_line_is_wrong_exactly_when_the_rules_say_so(lines: list[str]) -> None:
    file = DelimitedFile(path="x", num_columns=2, positions=(1, 0))
    fields = split_fields("".join(line + "\n" for line in lines).encode(), b",", 2)
    _, wrong = fields.integers(file.positions)
    wrong |= ~fields.present(file.positions[:1])[0]
    good = [n for n, line in enumerate(lines) if explain_line(line.encode(), b",", file, COLUMNS) is None]
    assert fields.lines[~wrong].tolist() == good


def test_distinct_texts_are_parsed_once() -> None:
    fields = split_fields(b"3.5,0\n4,0\n3.5,0\n,0\nlong and wrong,0\nx,0\n", b",", 2)
    seen: list[bytes] = []

    def value(text: bytes) -> float | None:
        seen.append(text)
        return float(text) if text[:1].isdigit() else None

    values, wrong = fields.distinct(0, value)
    assert sorted(seen) == [b"", b"3.5", b"4", b"nd wrong", b"x"]
    assert wrong.tolist() == [False, False, False, True, True, True]
    assert values[:3].tolist() == [3.5, 4.0, 3.5]
