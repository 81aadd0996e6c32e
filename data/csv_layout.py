"""`CsvLayout`: the `[csv]` section of a schema TOML: how lines of separated text are read. All keys are optional.

[csv]
delimiter = ","                 # one ASCII character
columns = ["click", "price"]    # names of the columns, for files without a header
header = true                   # the first line of each file names the columns; default: unless `columns` does
quote = '"'                     # around values that hold the delimiter; "": quotes have no meaning
null = ["NULL", "NA"]           # texts that mean a missing value, as the empty text always does
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError
from data.schema_file import check_keys

__all__ = ["CsvLayout", "split_line"]

_KEYS: Mapping[str, type] = {"delimiter": str, "columns": list, "header": bool, "quote": str, "null": list}


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvLayout:
    """The `[csv]` section.

    Attributes:
        delimiter, quote: one ASCII character; no quote: empty.
        columns: names of the columns; empty: the header names them.
        header: the first line of each file is a header.
        null: texts of missing values, besides the empty one.
    """

    delimiter: str = ","
    quote: str = '"'
    columns: tuple[str, ...] = ()
    header: bool = True
    null: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str, section: Mapping[str, Any]) -> CsvLayout:
        """Parse the section of the schema file `path`.

        Raises:
            InputError: an unknown key, or a value out of range.
        """
        where = f"{path}: csv"
        check_keys(where, section, _KEYS)
        for key in ("columns", "null"):
            if not all(isinstance(item, str) for item in section.get(key, [])):
                raise InputError(f"{where}: {key} must be a list of texts, got {section[key]!r}")
        columns = tuple(section.get("columns", ()))
        found = cls(
            delimiter=section.get("delimiter", ","),
            quote=section.get("quote", '"'),
            columns=columns,
            header=section.get("header", not columns),
            null=tuple(section.get("null", ())),
        )
        for key, text, is_optional in (("delimiter", found.delimiter, False), ("quote", found.quote, True)):
            if (text or not is_optional) and (len(text) != 1 or not text.isascii() or text in "\r\n\0"):
                raise InputError(f"{where}: {key} must be one ASCII character, got {text!r}")
        if found.delimiter == found.quote:
            raise InputError(f"{where}: delimiter and quote must differ, got {found.quote!r} for both")
        if not found.header and not columns:
            raise InputError(f"{where}: header = false needs columns, the names of the columns")
        return found


def split_line(line: str, form: CsvLayout) -> list[str]:
    """The values of one line. For headers and messages; `data.csv_lines` parses data."""
    try:
        if not form.quote:
            return next(csv.reader([line], delimiter=form.delimiter, quoting=csv.QUOTE_NONE))
        return next(csv.reader([line], delimiter=form.delimiter, quotechar=form.quote))
    except csv.Error:  # a value beyond the module's limit of 128 KiB
        return line.split(form.delimiter)


def has_open_quote(line: str, form: CsvLayout) -> bool:
    """Whether the last quoted value of a line does not end in it. False for values that `split_line` does not read."""
    reader = csv.reader([line.rstrip("\r\n"), ""], delimiter=form.delimiter, quotechar=form.quote)
    try:
        next(reader)
    except csv.Error:
        return False
    return reader.line_num > 1  # an open value goes on in the next line
