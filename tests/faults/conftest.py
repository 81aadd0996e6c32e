"""Jobs and servers as in the tests of whole jobs."""

from __future__ import annotations

from tests.system.conftest import clicks, server, writes

__all__ = ["clicks", "server", "writes"]
