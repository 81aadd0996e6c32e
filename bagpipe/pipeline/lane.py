"""`Lane`: one lane's walk over its steps, batch after batch: wait, call the handler, publish progress.

a turn with tracks: `pipeline.free_order` chooses the next step
per step:  requirements, hazards ──Board.wait──> events ──Stream.wait──> handler(index) ──> event, trace, Board.advance

The completion of an action has two parts. The board says that its handler has returned and its host results are ready.
With streams, its event says that its device work is done. A lane waits for both (`pipeline.stream`). On a device lane
only the stream waits for the event, and a trace shows this wait as a gap (`pipeline.device_times`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from bagpipe.errors import JobError
from bagpipe.pipeline.board import Aborted, Board
from bagpipe.pipeline.compile import LanePlan, Step
from bagpipe.pipeline.device_times import DeviceTimes
from bagpipe.pipeline.free_order import FreeOrder, LaneOrder
from bagpipe.pipeline.report import LaneReport, StepTimes
from bagpipe.pipeline.stream import Event, Stream
from bagpipe.pipeline.trace import Trace
from bagpipe.util.priority import lower_thread_priority

__all__ = ["EndOfBatches", "EventRing", "Lane"]

#: Batches whose events are kept per op. A hazard that reaches further back waits for the oldest kept event, which is
#: later on the same stream and therefore implies it. With the loop's read-ahead bound it completed long before.
_EVENT_BATCHES = 64

#: Lanes that work ahead of the computation or behind it, by the start of their names. It waits for turns of the others.
_BACKGROUND = ("data", "net-in", "copy", "net-out", "ack")


class EndOfBatches(Exception):
    """Raised by the source's handler: the requested batch does not exist."""


class EventRing:
    """Latest events of one op; the event of action n is at ``n % size``. Written by the op's lane, read by all lanes.

    Empty on a CPU, where an action is done when its handler returns.
    """

    def __init__(self, actions_per_batch: int) -> None:
        self._events: list[Event | None] = [None] * (_EVENT_BATCHES * actions_per_batch)

    def put(self, action: int, event: Event | None) -> None:
        self._events[action % len(self._events)] = event

    def get(self, action: int, done: int) -> Event | None:
        """The event of `action`, or a later one of the same stream, which implies it. `done`: number of events put."""
        size = len(self._events)
        return self._events[max(action, done - size) % size]


class Lane:
    """State of one lane. Only the thread that walks it modifies it, so it needs no lock.

    `main` walks the lane to its end, as a thread's body. `advance` walks it one turn at a time, or a part of a turn.

    Attributes:
        gate: held during every action. Whoever else holds it keeps the lane from its next one.
    """

    def __init__(
        self,
        *,
        number: int,
        plan: LanePlan,
        first_turn: int,
        first_batch: int,
        board: Board,
        stream: Stream,
        rings: list[EventRing],
        trace: Trace | None,
        times: DeviceTimes | None,
        steps: StepTimes,
        on_batch: Callable[[int], None] | None,
        must_stop: Callable[[], bool],
        failed: Callable[[BaseException, str], None],
        left: Callable[[int], None],
        order: LaneOrder | None = None,
    ) -> None:
        self.name = plan.resource.name
        self.stream = stream
        self._is_background = plan.resource.name.startswith(_BACKGROUND)
        self.gate = threading.Lock()
        self._number = number
        self._plan = plan
        self._turn = first_turn + first_batch
        self._next_step = 0  # of the turn
        self._free = FreeOrder(plan=plan, board=board, order=order, wait_any=self._wait_any)
        self._first_batch = first_batch
        self._last_offset = min((step.offset for step in plan.steps), default=0)
        self._board = board
        self._rings = rings
        self._trace = trace
        self._times = times
        self._steps = steps
        self._on_batch = on_batch
        self._must_stop = must_stop
        self._failed = failed
        self._left = left
        self._busy_ns = 0
        self._actions = 0
        self._waits_ns = [0] * len(rings)
        self._has_left = False
        self._at, self._index = "turn ", self._turn

    def main(self) -> None:
        """Walk to the end of the data, or to an error of any lane, as the body of a thread."""
        if self._is_background:
            lower_thread_priority()
        while self.advance():
            pass

    def advance(self, until: int | None = None) -> bool:
        """Do the steps of one turn that are left, in the calling thread; the same thread each time.

        The error, of this lane or another one, is on the board.

        Args:
            until: operation after whose next action to return, within the turn; the next call goes on there.

        Returns:
            False after the last turn or an error.
        """
        board, steps, turn = self._board, self._plan.steps, self._turn
        with self._leaving(), self.stream.current():
            if self._has_left or not steps or turn + self._last_offset >= board.end:
                self._leave()
                return False
            while self._next_step < len(steps):
                step = self._free.step(self._next_step, turn)
                self._next_step += 1
                batch = turn + step.offset
                if self._first_batch <= batch < board.end and self._ready(step, batch):
                    # Checked after the wait, so that a request during the wait still skips the batch.
                    if step.is_source and self._must_stop():
                        board.finish(batch)
                    else:
                        with self.gate:
                            self._act(step, batch)
                if step.op == until:
                    break
            else:
                self._turn, self._next_step = turn + 1, 0
        return not self._has_left

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Record an error of this lane, and leave after any lane's error."""
        try:
            yield
        except Aborted:
            self._leave()
        except BaseException as error:
            self._failed(error, f"in lane {self.name}, at {self._at}{self._index}")
            self._leave()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._board.leave()
            self._left(self._number)

    def finish(self) -> None:
        """Wait for the stream, after all lanes have ended."""
        self.stream.synchronize()
        if self._times is not None:
            self._times.resolve()

    def does(self, op: int) -> bool:
        """Whether the operation is one of this lane."""
        return any(step.op == op for step in self._plan.steps)

    def report(self, op_names: tuple[str, ...]) -> LaneReport:
        waits_s = {name: ns / 1e9 for name, ns in zip(op_names, self._waits_ns, strict=True) if ns}
        return LaneReport(
            busy_s=self._busy_ns / 1e9, wait_s=sum(waits_s.values()), waits_s=waits_s, actions=self._actions
        )

    def _ready(self, step: Step, batch: int) -> bool:
        """Wait for the step's requirements and hazards. False if the data ends before the batch."""
        self._at, self._index = step.text, batch * step.units + step.unit
        for r in step.requirements:
            if batch >= r.delay and not self.wait_for(r.op, (batch - r.delay) * r.actions + r.position, batch):
                return False
        for h in step.hazards:
            source = h.source(batch)
            if source > batch:
                raise JobError(f"hazard {h.name} makes batch {batch} wait for the later batch {source}")
            if source >= 0 and not self.wait_for(h.op, source * h.actions + h.position, batch):
                return False
        if self._board.error is not None:
            raise Aborted
        return batch < self._board.end

    def wait_for(self, op: int, need: int, batch: int, check: Callable[[], object] | None = None) -> bool:
        """Wait until `need` actions of an operation are done, on its device too. In the lane's own thread.

        Args:
            op, need, batch: see `Board.wait`.
            check: see `Board.wait`.

        Returns:
            False if the data ends before the batch.

        Raises:
            Aborted: the run has failed.
        """
        board = self._board
        if board.done[op] < need:
            start_ns = time.monotonic_ns()
            reached = board.wait(self._number, op, need, batch, check)
            self._waited(op, need - 1, start_ns)
            if not reached:
                return False
        event = self._rings[op].get(need - 1, board.done[op])
        if event is not None:
            start_ns = time.monotonic_ns()
            self.stream.wait(event)  # blocks the thread of a host lane until the device work is done
            self._waited(op, need - 1, start_ns)
        return True

    def _wait_any(self, needs: Mapping[int, int], batch: int) -> bool:
        """Wait until so many actions of one of several operations are done. False if the data ends before the batch."""
        start_ns = time.monotonic_ns()
        reached = self._board.wait_any(self._number, needs, batch)
        op = next((op for op, need in needs.items() if self._board.done[op] >= need), next(iter(needs)))
        self._waited(op, needs[op] - 1, start_ns)
        return reached

    def _waited(self, op: int, unit: int, start_ns: int) -> None:
        end_ns = time.monotonic_ns()
        self._waits_ns[op] += end_ns - start_ns
        if self._trace is not None:
            self._trace.note(self.name, f"wait {self._board.op_names[op]} #", unit, start_ns, end_ns, "wait")

    def _act(self, step: Step, batch: int) -> None:
        index = batch * step.units + step.unit
        if self._times is not None:
            self._times.begin()
        start_ns = time.monotonic_ns()
        try:
            step.handler(index)
        except EndOfBatches:
            if not step.is_source:
                raise
            self._board.finish(batch)
            return
        if self._times is not None:
            self._times.note(step.text, index)
        event = self.stream.record() if self.stream.records else None
        end_ns = time.monotonic_ns()
        if event is not None:
            self._rings[step.op].put(self._board.done[step.op], event)
        self._busy_ns += end_ns - start_ns
        self._actions += 1
        if self._trace is not None:
            self._trace.note(self.name, step.text, index, start_ns, end_ns)
        if step.ends_batch:
            self._steps.mark(end_ns)
        self._board.advance(step.op)
        if step.ends_batch and self._on_batch is not None:
            self._on_batch(batch)
