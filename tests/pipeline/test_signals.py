from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bagpipe.pipeline.runner import Interrupted, Runner
from bagpipe.pipeline.signals import DeferredSignals, StopOnSignals
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


def test_deferred_handlers_run_at_the_end_and_come_back() -> None:
    called: list[int] = []
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD]
    before = {number: signal.signal(number, lambda number, frame: called.append(number)) for number in numbers}
    ours = [signal.getsignal(number) for number in numbers]
    try:
        with DeferredSignals():
            with DeferredSignals() as inner:
                for number in numbers:
                    os.kill(os.getpid(), number)
                inner.check()
            assert not called, "a block inside another one calls none"
        assert sorted(called) == sorted(numbers)
        assert [signal.getsignal(number) for number in numbers] == ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_handler_that_raises_keeps_no_other_from_its_call() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    try:
        with DeferredSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signals.check()
        assert called == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_stop_is_not_deferred() -> None:
    with DeferredSignals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_without_a_handler_in_python_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredSignals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.signal(signal.SIGTERM, handler) is signal.SIG_IGN, "what the work sets stays"
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_signals_to_defer() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(DeferredSignals().__enter__).result()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
