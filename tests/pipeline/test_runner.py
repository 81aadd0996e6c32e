from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import JobError, ScheduleError
from bagpipe.pipeline.interpret import interpret
from bagpipe.pipeline.lane import EndOfBatches
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge
from bagpipe.util.priority import BACKGROUND_NICENESS
from tests.pipeline.loops import Gates, Tape, loops
from tests.pipeline.small_loop import HAZARDS, LANES, LOOP, OPS, handlers, nothing, until

DIRECT = {"fetch_after": lambda b: b, "evict_after": lambda b: b - 1}


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_batches", [0, 1, 2, 7])
@pytest.mark.parametrize("bounded_by", ["source", "argument"])
def test_every_action_of_every_batch_runs_once(num_batches: int, bounded_by: str) -> None:
    tape = Tape(LOOP, num_batches if bounded_by == "source" else num_batches + 5, HAZARDS)
    report = Runner(LOOP, tape.handlers(), HAZARDS).run(None if bounded_by == "source" else num_batches)
    assert (report.batches, report.stopped) == (num_batches, False)
    expected = [action.text for action in LOOP.unroll(num_batches).atoms()]
    assert sorted(tape.values) == sorted(expected)
    assert report.done == {f"0{op}": num_batches * (2 if op in "FB" else 1) for op in OPS}


@pytest.mark.parametrize("hazards", [HAZARDS, DIRECT], ids=["cached", "direct"])
def test_the_runner_equals_the_interpreter(hazards: dict[str, Callable[[int], int]]) -> None:
    sequential, threaded = Tape(LOOP, 20, hazards), Tape(LOOP, 20, hazards)
    interpret(LOOP.unroll(20), sequential.handlers(), hazards)
    Runner(LOOP, threaded.handlers(), hazards).run()
    assert threaded.values == sequential.values


@given(loops(), st.integers(0, 6), st.integers(0, 2**32))
def test_random_loops_with_random_delays_equal_the_interpreter(
    case: tuple[Loop, dict[str, Callable[[int], int]]], num_batches: int, seed: int
) -> None:
    loop, hazards = case
    sequential, threaded = Tape(loop, num_batches, hazards), Tape(loop, num_batches, hazards)
    interpret(loop.unroll(num_batches), sequential.handlers(), hazards)
    gates = Gates(seed)
    with gates.referee():
        report = Runner(loop, threaded.handlers(gates.pass_through), hazards).run()
    assert report.batches == num_batches
    assert threaded.values == sequential.values


@settings(max_examples=50)
@given(loops(), st.integers(0, 5), st.integers(0, 4))
def test_a_run_can_begin_at_any_batch(
    case: tuple[Loop, dict[str, Callable[[int], int]]], first_batch: int, num_batches: int
) -> None:
    """Batch numbers are unchanged, and no lane waits for earlier batches."""
    loop, hazards = case
    done: dict[str, list[int]] = {template.text: [] for _, template in loop.templates}
    report = Runner(loop, {text: calls.append for text, calls in done.items()}, hazards, first_batch=first_batch).run(
        num_batches
    )
    assert report.batches == num_batches
    for _, template in loop.templates:
        units = loop.units_per_batch(template.key, template.peer)
        assert sorted(done[template.text]) == list(range(first_batch * units, (first_batch + num_batches) * units))
    assert report.done == {text: len(calls) for text, calls in done.items()}


def test_no_run_begins_before_the_first_batch() -> None:
    with pytest.raises(ScheduleError, match="expected a first batch of at least 0, got -1"):
        Runner(LOOP, handlers(), HAZARDS, first_batch=-1)


@pytest.mark.parametrize("seed", range(20))
def test_a_hazard_on_micro_batches_waits_for_all_of_them(seed: int) -> None:
    loop = prefetch_loop(prefetch_depth=3, read_ahead=6, write_depth=1, microbatches=3, train=False)
    hazards = {"evict_after": lambda b: b - 1}
    tape, gates = Tape(loop, 5, hazards), Gates(seed)
    with gates.referee():
        Runner(loop, tape.handlers(gates.pass_through), hazards).run()
    assert len(tape.values) == 5 * (3 + 3)


def test_one_lane_with_offsets_is_a_software_pipeline() -> None:
    templates = (Template(op="X_READ", offset=2), Template(op="X_FETCH", offset=1), Template(op="F"))
    edges = (Edge(src="X_READ", dst="X_FETCH"), Edge(src="X_FETCH", dst="F"))
    loop = Loop(lanes={"all": templates}, edges=edges, source=(0, "X_READ"), sink=(0, "F"))
    tape = Tape(loop, 4, {})
    assert Runner(loop, tape.handlers()).run().batches == 4
    assert list(tape.values) == [action.text for action in loop.unroll(4).lanes["all"]]


def test_lanes_overlap() -> None:
    """All five lanes are inside a handler at the same time: each waits there for the four others."""
    meeting = threading.Barrier(5)
    where = {"X_READ": 4, "X_FETCH": 3, "X_INSERT": 2, "F": 0, "X_WRITEBACK": 2}
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=4)

    def meet(op: str) -> Callable[[int], None]:
        return lambda index: meeting.wait(30) and None if index == where[op] else None  # type: ignore[return-value]

    met = {op: meet(op) for op in where}

    def read(batch: int) -> None:
        met["X_READ"](batch)
        if batch == 10:
            raise EndOfBatches

    Runner(loop, handlers(**{**met, "X_READ": read}), {**HAZARDS, "evict_after": lambda b: -1}).run()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_lanes_that_work_ahead_or_behind_have_a_lower_priority() -> None:
    """The lane that computes waits for turns of the others, such as those between ranks."""
    here = os.getpriority(os.PRIO_PROCESS, 0)
    niceness: dict[str, int] = {}

    def note(op: str) -> Callable[[int], None]:
        def handler(batch: int) -> None:
            niceness[op] = os.getpriority(os.PRIO_PROCESS, 0) - here
            if op == "X_READ" and batch == 3:
                raise EndOfBatches

        return handler

    Runner(LOOP, handlers(**{op: note(op) for op in OPS}), HAZARDS).run()
    lower = min(BACKGROUND_NICENESS, 19 - here)
    compute = {template.op for template in LOOP.lanes["compute"]}
    assert niceness == {op: 0 if op in compute else lower for op in OPS}
    assert os.getpriority(os.PRIO_PROCESS, 0) == here, "of the calling thread"


def test_capacity_bounds_how_far_lanes_run_ahead() -> None:
    """Compute hangs in batch 0 until no lane can move; the depths bound the progress by then."""
    stuck = threading.Event()
    done: dict[str, int] = {}

    def forward(index: int) -> None:
        assert stuck.wait(30)
        if index == 0:
            done.update(runner.snapshot().done)

    def wait_for_all(batch: int) -> int:
        return -1

    loop = prefetch_loop(prefetch_depth=3, read_ahead=7, write_depth=2)
    runner = Runner(loop, handlers(30, F=forward), {"fetch_after": wait_for_all, "evict_after": lambda b: b - 1})
    watcher = threading.Thread(target=lambda: (until(lambda: runner.snapshot().done["0X_FETCH"] == 4), stuck.set()))
    watcher.start()
    runner.run()
    watcher.join()
    # Batch 0 inserted; 1, 2 and 3 fetched and not yet inserted (eviction 1 waits for update 0); 7 batches read.
    assert done["0X_INSERT"] == 1
    assert done["0X_FETCH"] == 4
    assert done["0X_READ"] <= 7


# --- the end, stops, errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_an_error_in_any_lane_at_any_batch_comes_out_and_ends_all(op: str, batch: int) -> None:
    def fail(index: int) -> None:
        if index == batch:
            raise ValueError(f"{op} {index} broke")

    runner = Runner(LOOP, handlers(9, **{op: fail}), HAZARDS)
    with pytest.raises(ValueError, match="broke") as error:
        runner.run()
    assert str(error.value) == f"{op} {batch} broke"
    assert error.value.__notes__ == [f"in lane {_lane(op)}, at 0{op}{batch}"]
    frames = traceback.extract_tb(error.value.__traceback__)
    assert frames[-1].name == "fail", "the traceback is the handler's own"


def _lane(op: str) -> str:
    return next(lane for lane, templates in LOOP.lanes.items() for t in templates if t.op == op)


@given(loops(), st.integers(0, 2**32), st.data())
def test_errors_in_random_loops_never_hang(
    case: tuple[Loop, dict[str, Callable[[int], int]]], seed: int, data: st.DataObject
) -> None:
    loop, hazards = case
    texts = sorted(action.text for action in loop.unroll(4).atoms())
    victim = data.draw(st.sampled_from(texts))
    gates, tape = Gates(seed), Tape(loop, 4, hazards)

    def before(text: str) -> None:
        gates.pass_through(text)
        if text == victim:
            raise RuntimeError(text)

    with gates.referee(), pytest.raises(RuntimeError) as error:
        Runner(loop, tape.handlers(before), hazards).run()
    assert str(error.value) == victim


def test_the_first_error_wins() -> None:
    first_failed = threading.Event()

    def fail_first(batch: int) -> None:
        first_failed.set()
        raise ValueError("first")

    def fail_second(batch: int) -> None:
        assert first_failed.wait(30)
        until(lambda: runner._board.error is not None)
        raise ValueError("second")

    runner = Runner(LOOP, handlers(9, X_FETCH=fail_first, X_EVICT=fail_second), HAZARDS)
    with pytest.raises(ValueError, match="first"):
        runner.run()


def test_a_lane_stuck_in_its_handler_does_not_hide_the_error() -> None:
    inside, release = threading.Event(), threading.Event()

    def hang(batch: int) -> None:
        inside.set()
        release.wait(30)

    def fail(batch: int) -> None:
        assert inside.wait(30)
        raise ValueError("broken")

    runner = Runner(LOOP, handlers(9, X_EVICT=hang, X_FETCH=fail), HAZARDS, grace_s=0.05)
    try:
        with pytest.raises(ValueError, match="broken") as error:
            runner.run()
        assert "still inside a handler 0.05 s later: copy" in error.value.__notes__
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "bagpipe-copy":
                thread.join()


def test_end_of_batches_from_another_lane_is_an_error() -> None:
    def end(batch: int) -> None:
        raise EndOfBatches

    with pytest.raises(EndOfBatches):
        Runner(LOOP, handlers(9, X_FETCH=end), HAZARDS).run()


def test_a_deadlock_by_hazard_is_detected() -> None:
    """Eviction of batch 2 needs its update, which needs its insertion, which follows the eviction."""
    hazards = {**HAZARDS, "evict_after": lambda b: b if b == 2 else -1}
    with pytest.raises(JobError, match=r"deadlock: .*copy at batch 2 waits for 0X_UPDATE"):
        Runner(LOOP, handlers(9), hazards).run()


def test_a_hazard_in_the_future_is_refused() -> None:
    with pytest.raises(JobError, match="hazard evict_after makes batch 0 wait for the later batch 1"):
        Runner(LOOP, handlers(9), {**HAZARDS, "evict_after": lambda b: b + 1}).run()


def test_hazards_may_use_what_the_source_read() -> None:
    read: set[int] = set()

    def read_batch(batch: int) -> None:
        if batch == 30:
            raise EndOfBatches
        read.add(batch)

    def planned(batch: int) -> int:
        assert batch in read
        return batch - 1

    Runner(LOOP, handlers(X_READ=read_batch), {"fetch_after": planned, "evict_after": planned}).run()


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_names_must_match() -> None:
    with pytest.raises(ScheduleError, match="no handler for 0OPT"):
        Runner(LOOP, {op: nothing for op in OPS if op != "OPT"}, HAZARDS)
    with pytest.raises(ScheduleError, match="handler 'X_PLAN' is for no op of the loop"):
        Runner(LOOP, handlers(X_PLAN=nothing), HAZARDS)
    with pytest.raises(ScheduleError, match=r"expected hazards \['evict_after', 'fetch_after'\], got \[\]"):
        Runner(LOOP, handlers())


def test_a_runner_runs_once() -> None:
    runner = Runner(LOOP, handlers(1), HAZARDS)
    runner.run()
    with pytest.raises(RuntimeError, match="runs once"):
        runner.run()


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_report_adds_up() -> None:
    seen: list[int] = []
    report = Runner(LOOP, handlers(50), HAZARDS, on_batch=seen.append).run()
    assert seen == list(range(50))
    assert report.steps.count == 49
    assert tuple(report.lanes) == LANES
    compute = report.lanes["compute"]
    assert compute.actions == 50 * (2 + 2 + 1 + 1)
    assert compute.wait_s == pytest.approx(sum(compute.waits_s.values()))
    assert set(compute.waits_s) <= {"0X_INSERT"}
    for lane in report.lanes.values():
        assert lane.busy_s + lane.wait_s <= report.wall_s


def test_waiting_time_is_charged_to_the_awaited_op() -> None:
    """Compute waits for the insertion while the store is slow to answer batch 3."""

    def slow(batch: int) -> None:
        if batch == 3:
            until(lambda: runner._board._num_waiting >= 3)  # copy, compute and net-out wait; data is bounded

    loop = prefetch_loop(prefetch_depth=1, read_ahead=8, write_depth=1)
    runner = Runner(loop, handlers(8, X_FETCH=slow), HAZARDS)
    report = runner.run()
    assert report.lanes["compute"].waits_s["0X_INSERT"] > 0
    assert report.peak_waiting >= 3


def test_the_trace_holds_every_action_and_the_waits() -> None:
    trace = Trace()
    Runner(LOOP, handlers(10), HAZARDS, trace=trace).run()
    actions = [span.name for span in trace.spans() if span.category == "action"]
    assert sorted(actions) == sorted(action.text for action in LOOP.unroll(10).atoms())
    lanes = {span.lane for span in trace.spans()}
    assert lanes == set(LANES)
    assert all(span.end_ns >= span.start_ns for span in trace.spans())


def test_the_trace_feeds_the_simulator() -> None:
    """Measured durations become costs; the simulated run is no longer than the measured one."""
    trace = Trace()
    report = Runner(LOOP, handlers(20), HAZARDS, trace=trace).run()
    costs = {s.name: (s.end_ns - s.start_ns) / 1e9 for s in trace.spans() if s.category == "action"}
    assert simulate(LOOP.unroll(20), costs, hazards=HAZARDS).makespan <= report.wall_s
