from __future__ import annotations

import os
import signal
import threading

import pytest

from bagpipe.pipeline.runner import Interrupted, Runner
from bagpipe.pipeline.signals import StopOnSignals
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")
LOOP = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2)
HAZARDS = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def on_batch(batch: int) -> None:
        if batch == 3:
            os.kill(os.getpid(), number)

    runner = Runner(LOOP, dict.fromkeys(OPS, lambda index: None), HAZARDS, on_batch=on_batch)
    with StopOnSignals(runner.request_stop) as signals:
        report = runner.run()
    assert report.stopped
    assert report.batches >= 4
    assert len(set(report.done.values())) == 1, "every batch read was finished"
    assert signals.received == [number]
    assert signal.getsignal(number) is before


def test_the_second_signal_aborts_and_the_third_kills() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside = threading.Event()

    def forward(index: int) -> None:
        if not inside.is_set():
            inside.set()
            os.kill(os.getpid(), signal.SIGINT)
            assert drained.wait(30)
            os.kill(os.getpid(), signal.SIGTERM)
        while runner._board.error is None:
            threading.Event().wait(0.001)

    drained = threading.Event()
    runner = Runner(LOOP, {**dict.fromkeys(OPS, lambda index: None), "F": forward}, HAZARDS)

    def stop() -> None:
        runner.request_stop()
        drained.set()

    with StopOnSignals(stop) as signals:
        with pytest.raises(Interrupted):
            runner.run()
        assert signal.getsignal(signal.SIGINT) is before, "a third signal does what it did without us"
    assert signals.received == [signal.SIGINT, signal.SIGTERM]


def test_without_our_handlers_ctrl_c_still_ends_the_lanes() -> None:
    def forward(index: int) -> None:
        if index == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if index >= 2:
            while runner._board.error is None:
                threading.Event().wait(0.001)

    runner = Runner(LOOP, {**dict.fromkeys(OPS, lambda index: None), "F": forward}, HAZARDS)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
