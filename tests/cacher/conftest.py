"""Fixture `listen`: the address of a test's own cacher."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def listen(tmp_path: Path) -> str:
    """A private unix socket."""
    return f"unix:{tmp_path}/cacher.sock"
