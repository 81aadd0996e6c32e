"""Wall-clock deadlines of single examples say nothing on a shared machine; the suite's timeout guards against hangs."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
