"""Fixtures of jobs and servers, shared with tests/system."""

from __future__ import annotations

from tests.system.conftest import clicks, server, writes

__all__ = ["clicks", "server", "writes"]
