"""Runs in steps: the caller walks the lane of the sink."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bagpipe.errors import JobError
from bagpipe.pipeline.interpret import interpret
from bagpipe.pipeline.runner import Runner
from bagpipe.schedule.builders.prefetch_loop import (
    declare_reading,
    declare_rows,
    declare_update,
)
from bagpipe.schedule.builders.whole_model import declare_accumulation
from bagpipe.schedule.ir.loop_builder import LoopBuilder
from bagpipe.testing.recording_streams import RecordingStreams
from tests.pipeline.loops import Tape
from tests.pipeline.small_loop import HAZARDS, LANES, LOOP


@pytest.mark.parametrize("num_batches", [0, 1, 5])
@pytest.mark.parametrize("rests", [False, True])
def test_steps_equal_the_interpreter(num_batches: int, rests: bool) -> None:
    sequential, stepped = Tape(LOOP, num_batches, HAZARDS), Tape(LOOP, num_batches, HAZARDS)
    interpret(LOOP.unroll(num_batches), sequential.handlers(), HAZARDS)
    runner = Runner(LOOP, stepped.handlers(), HAZARDS)
    runner.start()
    done = []
    while (b := runner.step()) is not None:
        done.append(b)
        if rests:
            runner.rest()
    assert runner.end().batches == num_batches
    assert done == list(range(num_batches))
    assert stepped.values == sequential.values


def test_the_sinks_lane_runs_in_the_calling_thread_and_no_lane_acts_at_rest() -> None:
    tape, threads, calls = Tape(LOOP, 6, HAZARDS), set(), []
    handlers = tape.handlers()

    def noted(name: str):
        def handler(index: int) -> None:
            calls.append(name)
            if name.lstrip("0") in ("F", "OPT"):
                threads.add(threading.get_ident())
            handlers[name](index)

        return handler

    runner = Runner(LOOP, {name: noted(name) for name in handlers}, HAZARDS)
    runner.start()
    while runner.step() is not None:
        runner.rest()
        before = len(calls)
        runner.rest()
        assert len(calls) == before
    runner.end()
    assert threads == {threading.get_ident()}


def test_a_batch_is_walked_in_parts() -> None:
    builder = LoopBuilder(read_ahead=4)
    declare_reading(builder)
    declare_rows(builder, prefetch_depth=2, write_depth=2)
    declare_update(builder)
    declare_accumulation(builder, microbatches=3)
    loop = builder.build().loop
    sequential, stepped, calls = Tape(loop, 4, HAZARDS), Tape(loop, 4, HAZARDS), []
    interpret(loop.unroll(4), sequential.handlers(), HAZARDS)
    handlers = dict(stepped.handlers())

    def noted(name: str, handler: Callable[[int], None]) -> Callable[[int], None]:
        def note(index: int) -> None:
            calls.append(f"{name.lstrip('0')}{index}")
            handler(index)

        return note

    of_lane = {"X_EMBED", "F", "B", "X_EMBED_GRAD", "X_UPDATE", "OPT"}
    runner = Runner(
        loop, {n: noted(n, call) if n.lstrip("0") in of_lane else call for n, call in handlers.items()}, HAZARDS
    )
    runner.start()
    seen = []
    for b in range(4):
        for _ in range(2):
            calls.clear()
            assert runner.step(until="0B") == b
            seen.append(list(calls))
            runner.rest()
        calls.clear()
        assert runner.step() == b
        seen.append(list(calls))
    assert runner.step(until="0B") is None
    assert runner.end().batches == 4
    assert seen[:3] == [["X_EMBED0", "F0", "B0"], ["F1", "B1"], ["F2", "B2", "X_EMBED_GRAD0", "X_UPDATE0", "OPT0"]]
    assert stepped.values == sequential.values


@pytest.mark.parametrize("name", ["X_FETCH", "F"])
def test_an_error_of_any_lane_is_raised_by_step(name: str) -> None:
    tape = Tape(LOOP, 6, HAZARDS)
    handlers = dict(tape.handlers())
    name = next(text for text in handlers if text.lstrip("0") == name)
    whole = handlers[name]

    def failing(index: int) -> None:
        if index >= 2:
            raise ValueError("of the caller")
        whole(index)

    handlers[name] = failing
    runner = Runner(LOOP, handlers, HAZARDS)
    runner.start()
    with pytest.raises(ValueError, match="of the caller"):
        _walk(runner)


def _walk(runner: Runner) -> None:
    while runner.step() is not None:
        pass


def test_a_run_can_be_given_up_between_steps() -> None:
    runner = Runner(LOOP, Tape(LOOP, 50, HAZARDS).handlers(), HAZARDS)
    runner.start()
    assert runner.step() == 0
    runner.abort(JobError("enough"))
    with pytest.raises(JobError, match="enough"):
        runner.end()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bagpipe-")]


def test_a_held_lane_begins_no_action_until_the_next_step() -> None:
    tape, calls = Tape(LOOP, 20, HAZARDS), []
    handlers = tape.handlers()

    def noted(name: str):
        def handler(index: int) -> None:
            calls.append(name)
            handlers[name](index)

        return handler

    runner = Runner(LOOP, {name: noted(name) for name in handlers}, HAZARDS)
    runner.start()
    while (b := runner.step()) is not None:
        runner.hold("copy")
        runner.hold("copy")
        evicted = runner.num_done("0X_EVICT")
        assert evicted >= b + 1
        runner.await_done("0X_WRITEBACK", evicted)
        assert runner.num_done("0X_WRITEBACK") == evicted
        runner.await_done("0X_UPDATE", b + 1)
        assert runner.num_done("0X_EVICT") == calls.count("0X_EVICT") + calls.count("X_EVICT") == evicted
    assert runner.end().batches == 20


def test_a_run_is_given_up_while_a_lane_is_held() -> None:
    runner = Runner(LOOP, Tape(LOOP, 50, HAZARDS).handlers(), HAZARDS)
    runner.start()
    runner.step()
    runner.hold("copy")
    runner.abort(JobError("enough"))
    with pytest.raises(JobError, match="enough"):
        runner.await_done("0X_WRITEBACK", 40)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bagpipe-")]


def test_work_on_a_device_is_done_at_rest() -> None:
    """The caller reads what lanes have enqueued, on a stream of its own."""
    streams = RecordingStreams()
    runner = Runner(LOOP, Tape(LOOP, 3, HAZARDS).handlers(), HAZARDS, streams=streams)
    runner.start()
    runner.step()
    assert not synchronised(streams)
    runner.hold("copy")
    runner.await_done("0X_WRITEBACK", 1)
    assert synchronised(streams) == {"copy", "compute", "net-out"}
    runner.rest()
    assert synchronised(streams) == set(LANES)
    _walk(runner)
    runner.end()


def synchronised(streams: RecordingStreams) -> set[str]:
    return {lane for lane, call, _ in streams.log if call == "synchronize"}
