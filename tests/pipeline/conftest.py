"""Hypothesis settings and thread checks of the runner tests.

Hypothesis's deadlines are off: they are meaningless on a shared machine. The suite's timeout guards against hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Assert that no lane thread outlives its run."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and "bagpipe" in thread.name]
    assert not left
