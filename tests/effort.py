"""What the default run leaves to `make test-full`: examples of costly properties, and cases of large products."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["at_most", "costly", "some_of"]

#: Of the suite's profile, in `tests/conftest.py`.
_USUAL = 50


def at_most(number: int) -> settings:
    """A decorator: so many examples in the suite, and in other profiles as many times more as of other properties."""
    return settings(max_examples=max(1, number * settings.default.max_examples // _USUAL))


def costly(number: int) -> settings:
    """A decorator for examples of more than 50 ms: half as many in the suite, as `at_most` in other profiles."""
    return at_most(max(1, number // 2) if settings.default.max_examples == _USUAL else number)


def some_of(cases: Sequence[Any], chosen: Collection[int]) -> list[Any]:
    """Values of `pytest.mark.parametrize`: cases of which only those with the chosen numbers are in the default run."""
    return [
        case
        if number in chosen
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
