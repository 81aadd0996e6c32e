"""Wall-clock deadlines of single examples say nothing on a shared machine; the suite's timeout guards against hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Whatever happens in a run, its lanes are gone when it returns."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and "bagpipe" in thread.name]
    assert not left
