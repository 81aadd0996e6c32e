"""The smallest prefetch loop, with handlers that do nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bagpipe.pipeline.lane import EndOfBatches
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from tests.pipeline.loops import Handlers

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")
LANES = ("data", "net-in", "copy", "compute", "net-out")
LOOP = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, microbatches=2)
HAZARDS = {"fetch_after": lambda b: b - 3, "evict_after": lambda b: b - 2}


def nothing(index: int) -> None:
    pass


def handlers(num_batches: int | None = None, **special: Callable[[int], None]) -> Handlers:
    def read(batch: int) -> None:
        if batch == num_batches:
            raise EndOfBatches

    return {**dict.fromkeys(OPS, nothing), "X_READ": read, **special}


def until(condition: Callable[[], bool]) -> None:
    """Busy-wait, yielding the processor; the test's timeout bounds it."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)
