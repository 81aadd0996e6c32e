"""Runs that end before their data: requested stops, and errors while a lane waits."""

from __future__ import annotations

import threading

import pytest

from bagpipe.errors import JobError
from bagpipe.pipeline.runner import Interrupted, Runner
from tests.pipeline.loops import Tape
from tests.pipeline.small_loop import HAZARDS, LOOP, handlers, until


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_a_lane_that_waits_without_deadline_is_woken_by_an_error(by_another_thread: bool) -> None:
    inside, woken = threading.Event(), threading.Event()

    def read(batch: int) -> None:
        if batch == 3:
            inside.set()
            assert woken.wait(30)
            raise JobError("given up")

    def forward(batch: int) -> None:
        assert inside.wait(30)
        if not by_another_thread:
            raise ValueError("broken")
        runner.abort(ValueError("broken"))

    runner = Runner(LOOP, handlers(None, X_READ=read, F=forward), HAZARDS, wake=woken.set)
    with pytest.raises(ValueError, match="broken") as error:
        runner.run()
    assert not any("still inside" in note for note in getattr(error.value, "__notes__", []))


def test_stop_finishes_what_was_read() -> None:
    tape = Tape(LOOP, 1000, HAZARDS)

    def on_batch(batch: int) -> None:
        if batch == 5:
            runner.request_stop()

    runner = Runner(LOOP, tape.handlers(), HAZARDS, on_batch=on_batch)
    report = runner.run()
    assert report.stopped
    assert 6 <= report.batches <= 6 + 4
    assert set(tape.values) == {action.text for action in LOOP.unroll(report.batches).atoms()}


def test_stop_before_the_run_reads_nothing() -> None:
    runner = Runner(LOOP, handlers(9), HAZARDS)
    runner.request_stop()
    report = runner.run()
    assert (report.batches, report.stopped, report.done["0X_READ"]) == (0, True, 0)


def test_a_second_stop_aborts() -> None:
    inside = threading.Event()

    def forward(index: int) -> None:
        inside.set()
        until(lambda: runner._board.error is not None)

    runner = Runner(LOOP, handlers(None, F=forward), HAZARDS)

    def stop_twice() -> None:
        assert inside.wait(30)
        runner.request_stop()
        runner.request_stop()

    stopper = threading.Thread(target=stop_twice)
    stopper.start()
    with pytest.raises(Interrupted):
        runner.run()
    stopper.join()
