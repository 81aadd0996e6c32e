"""Ranges of configuration values, part of a field's type: ``batch_size: Annotated[int, at_least(1)] = 1024``."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NewType

from bagpipe.optim import LEAST_DIVISOR

__all__ = [
    "ABOVE_0",
    "ASCENDING",
    "BELOW_1",
    "DIVISOR",
    "FROM_0_TO_1",
    "ISO_TIME",
    "POWER_OF_TWO",
    "SHARDS",
    "WEIGHTS",
    "WIDTHS",
    "IntOrAuto",
    "NumberText",
    "Range",
    "at_least",
    "at_least_or_auto",
    "each_of",
    "matching",
    "one_of",
    "seconds_of",
]


#: Numbers as text, or a word in their place; in a file also a number or a list.
NumberText = NewType("NumberText", str)

#: An integer, or the word auto.
IntOrAuto = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a key accepts.

    Attributes:
        words: completes "must be …".
        contains: whether a value of the key's type is in range.
    """

    words: str
    contains: Callable[[Any], bool]


def at_least(minimum: int) -> Range:
    return Range(f"at least {minimum}", lambda value: value >= minimum)


def at_least_or_auto(minimum: int) -> Range:
    return Range(f"at least {minimum}, or auto", lambda value: value == "auto" or value >= minimum)


def one_of(*choices: str) -> Range:
    return Range(f"one of {', '.join(choices)}", lambda value: value in choices)


def each_of(*choices: str) -> Range:
    return Range(f"a list of {', '.join(choices)}", lambda values: set(values) <= {*choices})


def matching(pattern: str, words: str) -> Range:
    """Strings that match a regular expression in full."""
    return Range(words, lambda value: re.fullmatch(pattern, value) is not None)


def seconds_of(time: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 time, in UTC unless it names a zone; None: it is none."""
    with suppress(ValueError):
        found = datetime.fromisoformat(time)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    return None


ABOVE_0 = Range("more than 0", lambda value: value > 0)
DIVISOR = Range(
    f"at least {LEAST_DIVISOR:g}, so that no step is 0 / 0 where a gradient is 0", lambda value: value >= LEAST_DIVISOR
)
BELOW_1 = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
FROM_0_TO_1 = Range("from 0 to 1", lambda value: 0 <= value <= 1)
ASCENDING = Range(
    "ascending numbers of at least 1", lambda value: list(value) == sorted(value) and min(value, default=1) >= 1
)
ISO_TIME = Range(
    "a time such as 2026-11-26T18:00:00+01:00, or empty", lambda value: not value or seconds_of(value) is not None
)
WIDTHS = Range("widths of at least 1", lambda value: all(width >= 1 for width in value))
WEIGHTS = Range(
    "numbers of at least 0, not all of them 0",
    lambda values: all(value >= 0 for value in values) and any(values) == bool(values),
)
POWER_OF_TWO = Range("a power of two from 1 to 65536", lambda value: value in {2**exponent for exponent in range(17)})


def _are_shards(values: tuple[str, ...]) -> bool:
    if len(values) == 1 and values[0].isdecimal():
        return 1 <= int(values[0]) <= 64
    return all(re.fullmatch(r"unix:.+|(grpcs?://)?[^/]+:\d{1,5}", value) for value in values)


SHARDS = Range(
    "a number from 1 to 64, or addresses unix:PATH, HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT", _are_shards
)
