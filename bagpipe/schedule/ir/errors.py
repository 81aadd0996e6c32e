"""The one error of the schedule package."""

from __future__ import annotations

from bagpipe.errors import InputError

__all__ = ["ScheduleError"]


class ScheduleError(InputError):
    """An action, program or schedule request is invalid: one line saying what was expected and what came."""
