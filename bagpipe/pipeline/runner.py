"""`Runner`: runs a loop with one thread per lane until the source has no more batches.

    lane thread, turn t:  for each step: wait until its requirements are done ──> handler(index) ──> board.advance(op)

    run()                            every lane has a thread
    start(), step(), step(), …, end()   the calling thread walks the lane of the sink, one batch a step

* **Steps.** Between two steps the other lanes go on until their bounds. `rest` waits until none of them acts; `hold`
  stops one lane.
* **End.** The source's handler raises `EndOfBatches` for batch b. Every lane finishes the batches before b and returns.
* **Stop.** After `request_stop()` the source reads no more batches; batches already read finish. A second call aborts.
* **Error.** The first error wins. The other lanes stop at their next action. `run` joins them and raises the error with
  its own traceback and a note with lane and action.
* **Hang.** A thread inside a handler cannot be stopped from outside, so handlers with I/O have their own deadlines.
  After an error `run` waits `grace_s` for the lanes, then raises the error and names the lanes still in a handler.
* **Deadlock.** If all lanes wait for each other (for example because of a wrong hazard), the board raises a JobError.

Thread-local settings (such as torch's grad mode) have their defaults; handlers that need other values set them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from bagpipe.errors import JobError, ScheduleError
from bagpipe.pipeline.board import NO_END, Aborted, Board
from bagpipe.pipeline.compile import CompiledLoop, LanePlan, compile_loop
from bagpipe.pipeline.device_times import DeviceTimes
from bagpipe.pipeline.free_order import LaneOrder
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.lane import EndOfBatches, EventRing, Lane
from bagpipe.pipeline.report import Report, StepTimes
from bagpipe.pipeline.stream import NullStreams, Origin, Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.program import Hazards

__all__ = ["EndOfBatches", "Interrupted", "Runner"]


#: Longest sleep of the calling thread. A signal that arrives just before the sleep does not wake it, and Python runs
#: signal handlers only in the main thread.
_WAKE_S = 0.5


class Interrupted(JobError):
    """A second stop request aborted the run."""


class Runner:
    """Runs a loop once.

    Args:
        loop: the loop; checked here.
        handlers: ``1F`` or ``F`` -> function of the action's index (a batch, or a micro-batch counted over all
            batches).
        hazards: hazard name -> function of a batch that returns the batch to wait for, or -1. The waiting lane calls it
            after the step's other requirements are met, so the source has read the batch.
        streams: streams of the lanes; default: host lanes only.
        trace: records every action and wait, and the device times of actions on a device.
        on_batch: called with the batch number after a batch's sink, in the sink's lane.
        agree: with several ranks: maps this rank's stop request to the decision of all ranks. The source's lane calls
            it once before each batch, so that all ranks read the same batches.
        on_error: called once with the run's first error, immediately and in the thread where it occurred. Other lanes
            can still be inside their handlers. Not called for errors passed to `abort` or for a deadlock. Must not
            raise.
        wake: called once on the run's first error from any source, to end waits without a deadline in a handler or in
            `agree`. Must not raise or block.
        grace_s: time `run` waits for the lanes after an error; longer than the longest deadline of a handler.
        orders: lane with tracks -> its orders, given or taken down.
        first_batch: number of the first batch. Earlier batches count as done; handlers get indices as if these batches
            had been run.

    Raises:
        ScheduleError: the first batch is negative, the loop is invalid, or a handler or hazard is missing or unknown.
    """

    def __init__(
        self,
        loop: Loop,
        handlers: Mapping[str, Handler],
        hazards: Hazards | None = None,
        *,
        streams: Streams | None = None,
        trace: Trace | None = None,
        on_batch: Callable[[int], None] | None = None,
        agree: Callable[[bool], bool] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
        wake: Callable[[], object] | None = None,
        grace_s: float = 60.0,
        first_batch: int = 0,
        orders: Mapping[str, LaneOrder] | None = None,
    ) -> None:
        if first_batch < 0:
            raise ScheduleError(f"expected a first batch of at least 0, got {first_batch}")
        self._compiled: CompiledLoop = compile_loop(loop, handlers, hazards or {})
        self._streams = streams or NullStreams()
        self._trace = trace
        self._on_batch = on_batch
        self._agree = agree
        self._on_error = on_error
        self._wake = wake
        self._agreed_to_stop = False
        self._grace_s = grace_s
        self._first_batch = first_batch
        self._orders = orders or {}
        self._done_before = [first_batch * actions for actions in self._compiled.op_actions]
        lane_names = [lane.resource.name for lane in self._compiled.lanes]
        self._board = Board(self._compiled.op_names, lane_names, done=self._done_before)
        self._lanes: list[Lane] = []
        self._threads: dict[int, threading.Thread] = {}
        self._inside: set[int] = set()  # lanes that have not ended
        self._stepped: Lane | None = None
        self._held: list[Lane] = []
        self._steps = StepTimes()
        # Both queues are bounded: one message per lane and per stop request.
        self._stop_requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._start_ns: int | None = None
        self._end_ns: int | None = None

    def request_stop(self) -> None:
        """Stop reading batches and finish those read; the second call aborts. Safe in any thread and signal handler.

        A signal handler interrupts the main thread, so it must not take a lock that the main thread can hold.
        SimpleQueue.put is reentrant.
        """
        self._stop_requests.put(None)
        self._inbox.put(None)

    def _fail(self, error: BaseException, note: str = "") -> None:
        """Record an error of the calling thread; call `on_error` and `wake` if it is the first."""
        if self._board.fail(error):
            if note:
                error.add_note(note)
            if self._on_error is not None:
                self._on_error(error)
            if self._wake is not None:
                self._wake()

    def abort(self, error: BaseException) -> None:
        """End the run with this error, unless it has already failed. Thread-safe."""
        if self._board.fail(error) and self._wake is not None:
            self._wake()
        self._inbox.put(None)

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested here or agreed on by all ranks."""
        return self._agreed_to_stop or not self._stop_requests.empty()

    def first_error(self) -> BaseException | None:
        """The first error, if any. For a handler that waits, and for a caller that continues after `run`.

        Includes a second stop request that arrives after the lanes have ended.
        """
        self._heed_requests()
        return self._board.error

    def _must_stop(self) -> bool:
        """Whether the source must stop. Its lane calls this once before each batch."""
        stop = not self._stop_requests.empty()
        if self._agree is not None:
            stop = self._agreed_to_stop = self._agree(stop)
        return stop

    def run(self, num_batches: int | None = None) -> Report:
        """Run to the end of the data, or at most `num_batches`. Only once per runner. Raises a handler's first error.

        Raises:
            JobError: the lanes are deadlocked.
            Interrupted: a stop was requested twice.
        """
        self._begin(num_batches)
        self._start_threads(range(len(self._lanes)))
        return self.end()

    def start(self) -> None:
        """Start all lanes but that of the sink, which the caller walks with `step`. Instead of `run`."""
        self._begin(None)
        sink = self._compiled.sink
        number = next(n for n, lane in enumerate(self._compiled.lanes) if any(step.op == sink for step in lane.steps))
        self._stepped = self._lanes[number]
        self._board.check_while_waiting(number, self._heed_requests)
        self._start_threads([other for other in range(len(self._lanes)) if other != number])

    def step(self, until: str | None = None) -> int | None:
        """Walk the lane of the sink until a batch ends, in the thread that called `start`.

        A lane whose actions run ahead of its turn has then begun the next batch too. Of a turn that ends the batch
        before it, the rest follows with the next call.

        Args:
            until: operation of the lane (``0B``) after whose next action to return; the next call goes on there.

        Returns:
            The number of the batch; None if there is no further one.

        Raises:
            The run's first error, of any lane, once all lanes have ended.
        """
        assert self._stepped is not None, "started"
        self._release()
        self._heed_requests()
        before = self._num_batches()
        op = self._compiled.sink if until is None else self._compiled.op_names.index(until)
        done = self._board.done[op]
        while self._stepped.advance(op):
            if self._num_batches() > before or (until is not None and self._board.done[op] > done):
                return self._first_batch + before
        if self._board.error is not None:
            self.end()
        return None

    def rest(self) -> None:
        """Wait until no lane acts before the next `step`, on the host or a device; between two steps.

        Raises:
            The run's first error.
        """
        self._release()
        self._board.rest()
        if self._board.error is not None:
            self.end()
        for lane in self._lanes:
            lane.stream.synchronize()

    def cut(self, end: int) -> None:
        """End the data before batch `end`, the next one to be stepped, whatever is read ahead; at rest."""
        self._board.finish(end)

    def hold(self, lane: str) -> None:
        """Keep a lane from further actions until the next `step`, `rest` or `end`; between two steps.

        Returns when the lane is in no action, and it and the lane of the sink have no work left on a device.
        """
        assert self._stepped is not None, "started"
        held = next(item for item in self._lanes if item.name == lane)
        if held not in self._held:
            held.gate.acquire()
            self._held.append(held)
        for item in (held, self._stepped):
            item.stream.synchronize()

    def num_done(self, op: str) -> int:
        """Number of the first batch for which an operation (``0X_READ``) is not done."""
        number = self._compiled.op_names.index(op)
        return self._board.done[number] // self._compiled.op_actions[number]

    def await_done(self, op: str, end: int) -> None:
        """Wait until an operation of another lane is done for all batches before `end`; between two steps.

        Raises:
            The run's first error.
        """
        assert self._stepped is not None, "started"
        number = self._compiled.op_names.index(op)
        try:
            self._board.wait(self._lanes.index(self._stepped), number, end * self._compiled.op_actions[number], end - 1)
        except Aborted:
            self.end()
        next(lane for lane in self._lanes if lane.does(number)).stream.synchronize()

    def await_batch(self, op: str, b: int, check: Callable[[], object] | None = None) -> bool:
        """Wait until an operation of another lane is done for a batch; between two steps. Counted as the sink's wait.

        Args:
            op, b: the operation and the batch.
            check: called about twice a second. What it raises leaves the run as it is.

        Returns:
            False if the data ends before the batch.

        Raises:
            The run's first error.
        """
        assert self._stepped is not None, "started"
        number = self._compiled.op_names.index(op)
        try:
            return self._stepped.wait_for(number, (b + 1) * self._compiled.op_actions[number], b, check)
        except Aborted:
            self.end()
            raise

    def _release(self) -> None:
        while self._held:
            self._held.pop().gate.release()

    def _begin(self, num_batches: int | None) -> None:
        if self._start_ns is not None:
            raise RuntimeError("a Runner runs once; make a new one")
        if num_batches is not None and num_batches < 0:
            raise ScheduleError(f"expected a number of batches of at least 0, got {num_batches}")
        self._start_ns = time.monotonic_ns()
        self._board.end = NO_END if num_batches is None else self._first_batch + num_batches
        rings = [EventRing(actions) for actions in self._compiled.op_actions]
        origin = self._streams.origin() if self._trace is not None else None
        self._lanes = [self._make_lane(number, plan, rings, origin) for number, plan in enumerate(self._compiled.lanes)]

    def end(self) -> Report:
        """Wait for the lanes after the last batch, and report. Raises the run's first error, each time."""
        self._release()
        if self._end_ns is None:
            self._await_lanes()
        self._end_ns = time.monotonic_ns()
        if self._board.error is not None:
            raise self._board.error
        for lane in self._lanes:
            lane.finish()
        self._end_ns = time.monotonic_ns()
        return self.snapshot()

    def _num_batches(self) -> int:
        """Batches done in this run."""
        sink = self._compiled.sink
        return (self._board.done[sink] - self._done_before[sink]) // self._compiled.op_actions[sink]

    def snapshot(self) -> Report:
        """The report so far. Thread-safe during the run and after a failure."""
        board, compiled = self._board, self._compiled
        end_ns = self._end_ns or time.monotonic_ns()
        done = [now - before for now, before in zip(board.done, self._done_before, strict=True)]
        return Report(
            batches=self._num_batches(),
            wall_s=(end_ns - (self._start_ns or end_ns)) / 1e9,
            stopped=self.stop_requested,
            lanes={lane.name: lane.report(compiled.op_names) for lane in self._lanes},
            steps=self._steps.report(),
            done=dict(zip(compiled.op_names, done, strict=True)),
            peak_waiting=board.peak_waiting,
        )

    def _make_lane(self, number: int, plan: LanePlan, rings: list[EventRing], origin: Origin | None) -> Lane:
        stream, trace = self._streams.stream(plan.resource), self._trace
        return Lane(
            number=number,
            plan=plan,
            first_turn=self._compiled.first_turn,
            first_batch=self._first_batch,
            board=self._board,
            stream=stream,
            rings=rings,
            trace=trace,
            times=None if trace is None or origin is None else DeviceTimes(trace, plan.resource.name, stream, origin),
            steps=self._steps,
            on_batch=self._on_batch,
            must_stop=self._must_stop,
            failed=self._fail,
            left=self._inbox.put,
            order=self._orders.get(plan.resource.name),
        )

    def _start_threads(self, lanes: Iterable[int]) -> None:
        try:
            for number in lanes:
                lane = self._lanes[number]
                thread = threading.Thread(target=lane.main, name=f"bagpipe-{lane.name}", daemon=True)
                thread.start()
                self._threads[number] = thread
                self._inside.add(number)
        except BaseException as error:  # a thread cannot start
            self._fail(error)

    def _await_lanes(self) -> None:
        """Wait for the threads. After an error, at most `grace_s`."""
        inside = self._inside
        try:
            while inside and self._board.error is None:
                self._take_message(_WAKE_S)
        except BaseException as error:  # of the calling thread: KeyboardInterrupt
            self._fail(error)
        deadline = time.monotonic() + self._grace_s
        while inside and (left_s := deadline - time.monotonic()) > 0:
            self._take_message(left_s)
        if inside and self._board.error is not None:
            stuck = ", ".join(self._lanes[number].name for number in sorted(inside))
            self._board.error.add_note(f"still inside a handler {self._grace_s:g} s later: {stuck}")
        for number, thread in self._threads.items():
            if number not in inside:
                thread.join()

    def _take_message(self, timeout_s: float) -> None:
        """Handle one message: the number of a lane that has ended, or None for a stop request."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if message is not None:
            self._inside.discard(message)
        else:
            self._heed_requests()

    def _heed_requests(self) -> None:
        if self._stop_requests.qsize() > 1:
            self._fail(Interrupted("aborted by a second request to stop"))
