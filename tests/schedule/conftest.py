"""Hypothesis settings of the schedule tests: no deadlines, which are meaningless on a shared machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
