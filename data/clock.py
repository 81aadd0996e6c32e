"""`Clock`: where the times of examples come from. They are seconds since 1970 UTC, read only where they are wanted.

    schema TOML: time, time_unit │ a fixed column ──Clock──> source ──with_times──> the same source, `Columns.times_s`

A value that is no time of the years 1970 to 9999 makes its row malformed. Milliseconds that are declared as seconds lie
outside these years, so a wrong unit is found at the first row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from data.source import Source

__all__ = ["TIMES", "UNITS", "Clock", "Clocked", "clock_of", "outside_times", "with_times"]

#: Unit of a column of integers -> parts of a second.
UNITS: Mapping[str, int] = {"s": 1, "ms": 1_000, "us": 1_000_000}

#: The times that examples can have, in seconds since 1970 UTC: 1970-01-01 00:00:00 to 9999-12-31 23:59:59.
TIMES = range(253_402_300_800)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The column of the examples' times.

    Attributes:
        name: of the column.
        unit: of its integers, a key of `UNITS`; empty: seconds, or what the type of the column says.
        is_named: a schema names the column; else the format has it.

    Raises:
        InputError: no name, or another unit.
    """

    name: str
    unit: str = ""
    is_named: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("time must be the name of a column, got an empty one")
        if self.unit and self.unit not in UNITS:
            raise InputError(f"time_unit must be one of {', '.join(UNITS)}, got {self.unit!r}")

    @property
    def parts(self) -> int:
        """Parts of a second that the integers of the column count."""
        return UNITS[self.unit or "s"]


@runtime_checkable
class Clocked(Protocol):
    """A source whose examples can have times.

    Attributes:
        clock: of its examples; None: they have no times.
        reads_times: its columns have `Columns.times_s`.
    """

    @property
    def clock(self) -> Clock | None: ...

    @property
    def reads_times(self) -> bool: ...

    def with_times(self) -> Source:
        """The source that reads the times too, if there is a clock.

        Raises:
            InputError: a file lacks the column, or has another type in it.
        """
        ...


def with_times(source: Source, form: str, asked_by: str = "data.expire_unit days") -> Source:
    """The source that reads the times of its examples too.

    Args:
        source: of any format.
        form: name of the format.
        asked_by: what needs the times, for the message.

    Raises:
        InputError: the data has no times, or a file lacks their column.
    """
    if isinstance(source, Clocked) and source.clock is not None:
        return source.with_times()
    raise InputError(
        f"{asked_by} needs a clock: expected a column of times in the schema (key time), or format avazu-csv or "
        f"movielens, got none for format {form}"
    )


def clock_of(source: Source) -> Clock | None:
    """The clock of the times that a source reads; None: it reads none."""
    return source.clock if isinstance(source, Clocked) and source.reads_times else None


def outside_times(times_s: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending positions of the numbers that are not in `TIMES`."""
    if not times_s.size or (int(times_s.min()) in TIMES and int(times_s.max()) in TIMES):
        return np.zeros(0, np.int64)
    return np.flatnonzero((times_s < TIMES.start) | (times_s >= TIMES.stop))
