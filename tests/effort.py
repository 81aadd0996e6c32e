"""`at_most`: the number of examples of a property whose examples cost much or show little new."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["at_most"]

#: Of the suite's profile, in `tests/conftest.py`.
_USUAL = 50


def at_most(number: int) -> settings:
    """A decorator: so many examples in the suite, and in other profiles as many times more as of other properties."""
    return settings(max_examples=max(1, number * settings.default.max_examples // _USUAL))
