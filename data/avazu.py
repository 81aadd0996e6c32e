"""Avazu's click logs (`train.csv` of its competition): comma-separated, columns found by the names in the header.

    click                    label, 0 or 1
    hour (YYMMDDHH)          two features: hour of the day, 0 to 23, and weekday, 0 (Monday) to 6
    9 site, app and device columns         ids of hexadecimal digits
    C1, banner_pos, device_type, …, C21    integer ids, -1 included
    id, and other columns                  ignored

That makes 23 features, each with its own table, and no dense columns. The date is not a feature: no later day shares
it. An empty field is a missing value.

Where times are wanted, an example's is the begin of its hour, which is in UTC, and no hour can be missing.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.schema import DataSchema, Feature, Table
from data.clock import Clock
from data.columns import Columns
from data.delimited import Column, DelimitedFile, Fields, Kind, explain_line, find_columns, good_columns, split_fields
from data.number_parsing import Positions
from data.source import Block, Segment
from data.text_files import BLOCK_BYTES, TextSource, first_line, list_files, read_text, segments_of_files

__all__ = ["COLUMNS", "AvazuSource", "avazu_schema"]

HEX_NAMES = (
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
)
INTEGER_NAMES = (
    "C1",
    "banner_pos",
    "device_type",
    "device_conn_type",
    *(f"C{number}" for number in range(14, 22)),
)


def _moment(text: bytes) -> datetime.datetime | None:
    """The begin of the hour YYMMDDHH; None if there is no such hour."""
    try:
        when = datetime.datetime.strptime(text.decode("ascii"), "%y%m%d%H")
    except (UnicodeDecodeError, ValueError):
        return None
    return when.replace(tzinfo=datetime.UTC)


_LABEL = Kind(words="0 or 1", pattern=re.compile(rb"[01]"))
_HOUR = Kind(
    words="an hour as YYMMDDHH",
    pattern=re.compile(rb"[0-9]{8}"),
    test=lambda text: _moment(text) is not None,
)
_HEX = Kind(words="a hexadecimal id of up to 16 digits", pattern=re.compile(rb"[0-9a-fA-F]{1,16}"))
_INTEGER = Kind(words="an integer of up to 16 digits", pattern=re.compile(rb"-?[0-9]{1,16}"))

#: The columns read, in the order of `DelimitedFile.positions`: label, hour, hexadecimal, integers.
COLUMNS = (
    Column(name="click", kind=_LABEL, required=True),
    Column(name="hour", kind=_HOUR),
    *(Column(name=name, kind=_HEX) for name in HEX_NAMES),
    *(Column(name=name, kind=_INTEGER) for name in INTEGER_NAMES),
)
#: The same where times are wanted.
_TIMED_COLUMNS = tuple(
    dataclasses.replace(column, required=True) if column.name == "hour" else column for column in COLUMNS
)
_FIRST_HEX = 2
_FIRST_INTEGER = _FIRST_HEX + len(HEX_NAMES)


def avazu_schema() -> DataSchema:
    """hour, weekday, then the columns by their names; one table of raw 64-bit ids per feature, with its name."""
    names = ("hour", "weekday", *HEX_NAMES, *INTEGER_NAMES)
    return DataSchema(
        label="click",
        dense=(),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name) for name in names),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AvazuSource(TextSource):
    """Avazu's text: a file, a .gz, or a folder of them, each with a header.

    Attributes:
        parts: the files in reading order, with the positions of their columns.
        schema: `avazu_schema()`; tables can be hashed or bounded.
        bad_rows: stop or skip.
        block_bytes: approximate text in a block.
        reads_times: see `data.clock.Clocked`.
    """

    parts: tuple[DelimitedFile, ...]
    schema: DataSchema = field(default_factory=avazu_schema)
    bad_rows: str = "stop"
    block_bytes: int = BLOCK_BYTES
    reads_times: bool = False

    @classmethod
    def at(cls, path: str, **options: object) -> AvazuSource:
        """The source of a file or folder.

        Raises:
            InputError: it does not exist, or a header lacks a column (the competition's test set has no `click`).
        """
        parts = tuple(find_columns(name, first_line(name), ",", COLUMNS) for name in list_files(path))
        return cls(parts=parts, **options)  # type: ignore[arg-type]

    @property
    def clock(self) -> Clock:
        """See `data.clock.Clocked`."""
        return Clock(name="time", is_named=False)

    def with_times(self) -> AvazuSource:
        """See `data.clock.Clocked`."""
        return dataclasses.replace(self, reads_times=True)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(part.path for part in self.parts)

    @property
    def layout(self) -> str:
        return f"avazu-csv/{self.block_bytes}"

    def segments(self) -> tuple[Segment, ...]:
        return segments_of_files(self.files, self.block_bytes, header=True)

    def read(self, block: Block) -> Columns:
        columns = _TIMED_COLUMNS if self.reads_times else COLUMNS
        file = next(part for part in self.parts if part.path == block.file)
        fields = split_fields(read_text(block), b",", file.num_columns)
        hexadecimal, integer = file.positions[_FIRST_HEX:_FIRST_INTEGER], file.positions[_FIRST_INTEGER:]
        labels, wrong = fields.distinct(file.positions[0], {b"0": 0.0, b"1": 1.0}.get)
        hours, bad_hours = _hours(fields, file.positions[1])
        hex_ids, bad_hex = fields.hexadecimals(hexadecimal)
        integers, bad_integers = fields.integers(integer)
        times_s = None
        if self.reads_times:
            times_s, untimed = _times(fields, file.positions[1])
            bad_hours = bad_hours | untimed
        there = fields.present((file.positions[1], *file.positions[1:]))  # the hour gives two features
        return good_columns(
            fields,
            schema=self.schema,
            labels=labels.astype(np.float32),
            ids=np.concatenate([hours, hex_ids, integers]),
            present=there,
            wrong=wrong | bad_hours | bad_hex | bad_integers,
            error=(lambda line: explain_line(line, b",", file, columns)) if self.bad_rows == "stop" else None,
            block=block,
            times_s=times_s,
        )


def _hours(fields: Fields, position: int) -> tuple[Positions, NDArray[np.bool_]]:
    """int64 ``[2, n]``: hour of the day and weekday (0 if missing), and flags of the lines without a valid hour."""

    def code(text: bytes) -> float | None:
        when = _moment(text) if _HOUR.fits(text) else None
        return 0.0 if not text else None if when is None else float(when.hour * 7 + when.weekday())

    codes, wrong = fields.distinct(position, code)
    hours, weekdays = np.divmod(np.where(wrong, 0.0, codes).astype(np.int64), 7)
    return np.stack([hours, weekdays]), wrong


def _times(fields: Fields, position: int) -> tuple[Positions, NDArray[np.bool_]]:
    """int64 ``[n]``: begin of the hour in seconds since 1970 UTC (0: none), and flags of the lines without one."""

    def time_s(text: bytes) -> float | None:
        when = _moment(text) if _HOUR.fits(text) else None
        return None if when is None else when.timestamp()

    times_s, wrong = fields.distinct(position, time_s)
    return np.where(wrong, 0.0, times_s).astype(np.int64), wrong
