"""Fixtures of jobs over the small click log of `tests/system`."""

from __future__ import annotations

from tests.system.conftest import clicks

__all__ = ["clicks"]
