"""`Runner`: walks a loop, one thread per lane, for as many batches as the source has.

    lane thread, turn t:  for each step: wait until its requirements are done ──> handler(index) ──> board.advance(op)

* **End.** The source's handler raises `EndOfBatches` for batch b: every lane finishes the batches before b and returns.
* **Stop.** `request_stop()` makes the source take no further batch; what was read is finished. A second request aborts.
* **Error.** The first one wins. The other lanes stop at their next action; `run` joins them and raises it, with its own
  traceback and a note naming lane and action.
* **Hang.** A thread inside a handler cannot be stopped from outside, so handlers that talk to the world have their own
  deadlines. After an error `run` waits `grace_s` for the lanes, then raises all the same and names those still inside.
* **Deadlock.** If all lanes wait for each other (a wrong hazard can do that), the board says so; nothing hangs.

Thread-local settings (such as torch's grad mode) are those of a new thread; handlers that need others set them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from bagpipe.errors import JobError, ScheduleError
from bagpipe.pipeline.board import NO_END, Board
from bagpipe.pipeline.compile import CompiledLoop, LanePlan, compile_loop
from bagpipe.pipeline.device_times import DeviceTimes, NoTimes
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.lane import EndOfBatches, EventRing, Lane
from bagpipe.pipeline.report import Report, StepTimes
from bagpipe.pipeline.stream import NullStreams, Origin, Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.program import Hazards

__all__ = ["EndOfBatches", "Interrupted", "Runner"]


#: How long the calling thread sleeps at most: a signal that comes as it falls asleep would not wake it, and Python's
#: handlers run in the main thread only.
_WAKE_S = 0.5


class Interrupted(JobError):
    """The run was aborted by a second request to stop."""


class Runner:
    """Runs a loop once.

    Args:
        loop: the loop; checked here.
        handlers: ``1F`` or ``F`` -> function of the action's index (a batch, or a micro-batch counted over all
            batches).
        hazards: hazard name -> function of a batch giving the batch to wait for, -1 for none. Called in the waiting
            lane,
            after the step's other requirements are met, so the source has read the batch.
        streams: streams of the lanes; default: host lanes only.
        trace: records every action and wait; on a device also when it did the actions.
        on_batch: called with the batch number after a batch's sink, in the sink's lane.
        agree: with several ranks: this rank's wish to stop -> what all ranks do. Called in the source's lane, once
            before each batch, so that no rank reads a batch that another does not.
        on_error: called once with the run's first error, at once and in the thread where it happened, while other
            lanes may still be inside their handlers. Not for errors given to `abort`, nor for a deadlock. Must not
            raise.
        wake: called once when the run has its first error, wherever from: ends the wait of a handler, or of `agree`,
            that has no deadline. Must not raise or wait.
        grace_s: how long `run` waits for the lanes after an error; longer than the longest deadline of a handler.
        first_batch: number of the first batch. All that the batches before had to do is done, so that nobody waits for
            it; handlers get the numbers of actions as if these batches had been run.

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
        self._done_before = [first_batch * actions for actions in self._compiled.op_actions]
        lane_names = [lane.resource.name for lane in self._compiled.lanes]
        self._board = Board(self._compiled.op_names, lane_names, done=self._done_before)
        self._lanes: list[Lane] = []
        self._steps = StepTimes()
        # Both queues are bounded by nature: one message per lane and per request to stop.
        self._stop_requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._start_ns: int | None = None
        self._end_ns: int | None = None

    def request_stop(self) -> None:
        """Stop reading batches and finish those read; the second call aborts. From any thread or signal handler.

        A signal handler runs in the midst of whatever the main thread is doing, so it may take no lock that the main
        thread may hold; SimpleQueue.put is made for that.
        """
        self._stop_requests.put(None)
        self._inbox.put(None)

    def _fail(self, error: BaseException, note: str = "") -> None:
        """The error of the calling thread; kept and told if it is the first."""
        if self._board.fail(error):
            if note:
                error.add_note(note)
            if self._on_error is not None:
                self._on_error(error)
            if self._wake is not None:
                self._wake()

    def abort(self, error: BaseException) -> None:
        """End the run with this error, unless it has one already. From any thread."""
        if self._board.fail(error) and self._wake is not None:
            self._wake()
        self._inbox.put(None)

    @property
    def stop_requested(self) -> bool:
        """A stop was asked for here, or agreed on."""
        return self._agreed_to_stop or not self._stop_requests.empty()

    def lost(self) -> BaseException | None:
        """The first error, if there is one: for a handler that waits, and for a caller whose work goes on after `run`.

        A second request to stop is one, though nobody takes messages any more when the lanes have left.
        """
        self._heed_requests()
        return self._board.error

    def _must_stop(self) -> bool:
        """Asked by the source's lane, once before each batch."""
        stop = not self._stop_requests.empty()
        if self._agree is not None:
            stop = self._agreed_to_stop = self._agree(stop)
        return stop

    def run(self, num_batches: int | None = None) -> Report:
        """Run to the end of the data, or for `num_batches` at most. Only once per runner.

        The error that a handler raised first is raised here.

        Raises:
            JobError: the lanes are in a deadlock.
            Interrupted: stopping was requested a second time.
        """
        if self._start_ns is not None:
            raise RuntimeError("a Runner runs once; make a new one")
        if num_batches is not None and num_batches < 0:
            raise ScheduleError(f"expected a number of batches of at least 0, got {num_batches}")
        self._start_ns = time.monotonic_ns()
        self._board.end = NO_END if num_batches is None else self._first_batch + num_batches
        rings = [EventRing(actions) for actions in self._compiled.op_actions]
        origin = self._streams.origin() if self._trace is not None else None
        self._lanes = [self._make_lane(number, plan, rings, origin) for number, plan in enumerate(self._compiled.lanes)]
        threads = [threading.Thread(target=lane.main, name=f"bagpipe-{lane.name}", daemon=True) for lane in self._lanes]
        self._live(threads)
        self._end_ns = time.monotonic_ns()
        if self._board.error is not None:
            raise self._board.error
        for lane in self._lanes:
            lane.finish()
        self._end_ns = time.monotonic_ns()
        return self.snapshot()

    def snapshot(self) -> Report:
        """The report so far; any thread may ask while the run goes on, and after it failed."""
        board, compiled = self._board, self._compiled
        end_ns = self._end_ns or time.monotonic_ns()
        done = [now - before for now, before in zip(board.done, self._done_before, strict=True)]
        return Report(
            batches=done[compiled.sink] // compiled.op_actions[compiled.sink],
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
            times=NoTimes()
            if trace is None or origin is None
            else DeviceTimes(trace, plan.resource.name, stream, origin),
            steps=self._steps,
            on_batch=self._on_batch,
            must_stop=self._must_stop,
            failed=self._fail,
            left=self._inbox.put,
        )

    def _live(self, threads: list[threading.Thread]) -> None:
        """Start the threads and see them out. On return they have ended, or had `grace_s` to after an error."""
        inside: set[int] = set()
        try:
            for number, thread in enumerate(threads):
                thread.start()
                inside.add(number)
            while inside:
                self._take_message(inside, _WAKE_S)
                if self._board.error is not None:
                    break
        except BaseException as error:  # the caller's own: Ctrl-C without our signal handlers, no memory for a thread
            self._fail(error)
        deadline = time.monotonic() + self._grace_s
        while inside and (left_s := deadline - time.monotonic()) > 0:
            self._take_message(inside, left_s)
        if inside and self._board.error is not None:
            stuck = ", ".join(self._lanes[number].name for number in sorted(inside))
            self._board.error.add_note(f"still inside a handler {self._grace_s:g} s later: {stuck}")
        for number, thread in enumerate(threads):
            if thread.ident is not None and number not in inside:
                thread.join()

    def _take_message(self, inside: set[int], timeout_s: float) -> None:
        """One message: the number of a lane that has left, or None: somebody asked to stop."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if message is not None:
            inside.discard(message)
        else:
            self._heed_requests()

    def _heed_requests(self) -> None:
        if self._stop_requests.qsize() > 1:
            self._fail(Interrupted("aborted by a second request to stop"))
