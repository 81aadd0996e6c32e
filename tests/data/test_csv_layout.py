from __future__ import annotations

import re
from typing import Any

import pytest

from bagpipe.errors import InputError
from data.csv_layout import CsvLayout, split_line


def test_defaults_are_commas_quotes_and_a_header() -> None:
    assert CsvLayout.of("s.toml", {}) == CsvLayout(delimiter=",", quote='"', columns=(), header=True, null=())


def test_files_whose_columns_the_schema_names_have_no_header_unless_it_says_so() -> None:
    assert not CsvLayout.of("s.toml", {"columns": ["a"]}).header
    assert CsvLayout.of("s.toml", {"columns": ["a"], "header": True}).header


BAD: list[tuple[dict[str, Any], str]] = [
    ({"separator": ";"}, "s.toml: csv: unknown key 'separator', known keys: delimiter, columns"),
    ({"delimiter": "::"}, "s.toml: csv: delimiter must be one ASCII character, got '::'"),
    ({"delimiter": ""}, "s.toml: csv: delimiter must be one ASCII character, got ''"),
    ({"delimiter": "\n"}, "s.toml: csv: delimiter must be one ASCII character, got '\\n'"),
    ({"quote": "«"}, "s.toml: csv: quote must be one ASCII character, got '«'"),
    ({"columns": [1]}, "s.toml: csv: columns must be a list of texts, got [1]"),
    ({"null": [0]}, "s.toml: csv: null must be a list of texts, got [0]"),
    ({"header": False}, "s.toml: csv: header = false needs columns, the names of the columns"),
    ({"header": 1}, "s.toml: csv: header must be true or false, got 1"),
    ({"quote": ","}, "s.toml: csv: delimiter and quote must differ, got ',' for both"),
]


@pytest.mark.parametrize(("section", "message"), BAD)
def test_other_values_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        CsvLayout.of("s.toml", section)


def test_a_line_is_split_with_and_without_quotes() -> None:
    line = 'a,"b,""c"""'
    assert split_line(line, CsvLayout()) == ["a", 'b,"c"']
    assert split_line(line, CsvLayout(quote="")) == ["a", '"b', '""c"""']
    long = "x" * 200_000
    assert split_line(f"{long},b", CsvLayout()) == [long, "b"]
