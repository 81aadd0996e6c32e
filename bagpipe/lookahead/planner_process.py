"""`PlannerProcess`: plans in a process of its own, outside the interpreter lock of the training process.

    training process                                  planner process (`bagpipe.lookahead.child`)
    batches ──ids──> ring of shared memory ─────────> window ──plan──┐
    RankBatch <──decode── ring of shared memory <────────────────────┘

The process is started as ``python -m``, so it imports no torch and runs no line of the user's program. It ends with the
training process, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack

from bagpipe.errors import JobError
from bagpipe.lookahead.frames import FramedPlan, FrameKind, decode_error, encode_spec
from bagpipe.lookahead.ids import encode_ids
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.link import Frame, Link, LinkClosed, open_shared_file
from bagpipe.lookahead.planning import in_order
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch

__all__ = ["RING_BYTES", "SLACK", "PlannerProcess"]

#: Batches read beyond the window. A batch has the time of so many steps for its way to the planner and back.
SLACK = 4
#: Bytes of each ring. Larger frames cross in pieces.
RING_BYTES = 8 << 20
_EXIT_S = 1.0


class PlannerProcess(WindowPlanner):
    """Plans in a process of its own, which starts on entering the context. Ids and plans cross by shared memory.

    Args:
        spec: what to plan for.
        slack: batches read beyond the window.
        ring_bytes: size of each of the two rings.

    Raises:
        InputError: `spec` cannot be planned for.
        JobError: `run`: the process ended unexpectedly. The next run starts another.
    """

    def __init__(self, spec: OracleSpec, *, slack: int = SLACK, ring_bytes: int = RING_BYTES) -> None:
        super().__init__(spec)
        self._slack = slack
        self._ring_bytes = ring_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._run_number = 0
        self._is_running = False
        self._is_open = False

    @property
    def max_held(self) -> int:
        """See `BatchPlanner`: the window and the slack."""
        return (self.spec.lookahead if self.spec.num_slots else 1) + self._slack

    @property
    def pid(self) -> int | None:
        """Process id of the planner process; None if there is none."""
        return self._process.pid if self._process is not None else None

    def open(self) -> None:
        """Start the process, and do not wait for it."""
        self._is_open = True
        self._start()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._is_open = False
        self._end()

    def plan_all(
        self, batches: Iterable[Batch], first_batch: int, on_batch: Callable[[Batch], object]
    ) -> Generator[FramedPlan, None, None]:
        """See `WindowPlanner`.

        Raises:
            RuntimeError: outside the context, or while another run is open.
            JobError: the process ended unexpectedly.
        """
        if not self._is_open or self._is_running:
            raise RuntimeError("a planner process is for one run at a time, inside its `with` block")
        self._is_running = True
        try:
            error = yield from self._run_all(batches, first_batch, on_batch)
        except LinkClosed:
            raise JobError(f"the planner process ended unexpectedly ({self._end()})") from None
        except GeneratorExit:
            raise
        except BaseException:
            self._end()  # a frame may be half sent
            raise
        finally:
            self._is_running = False
        if error is not None:
            raise error

    def _run_all(
        self, batches: Iterable[Batch], first_batch: int, on_batch: Callable[[Batch], object]
    ) -> Generator[FramedPlan, None, Exception | None]:
        """Yields the plans; returns the error of the batches, if they have one."""
        link, source = self._link or self._start(), iter(in_order(batches, first_batch))
        self._run_number = run = (self._run_number + 1) % (1 << 32)
        link.send(FrameKind.START, run, [encode_spec(self.spec)])
        num_sent = num_planned = 0
        error: Exception | None = None
        has_more, limit, is_too_large = True, self.max_held, False
        parts: list[bytearray] = []  # of the next plan, by rank
        while True:
            while has_more and num_sent - num_planned < limit:
                try:
                    batch = next(source, None)
                except Exception as raised:
                    error, batch = raised, None
                if batch is None:
                    has_more = False
                    link.send(FrameKind.END, run)
                    break
                if not is_too_large:
                    on_batch(batch)
                link.send(FrameKind.BATCH, run, encode_ids(batch))
                num_sent += 1
            frame = self._receive(link, run)
            if frame.kind == FrameKind.END:
                return error
            if frame.kind == FrameKind.ERROR:
                return decode_error(frame.data)
            if frame.kind == FrameKind.MORE:
                is_too_large, limit = True, limit + self.spec.lookahead
                continue
            parts.append(frame.data)
            if len(parts) == self.spec.world_size:
                num_planned += 1
                yield FramedPlan(parts=tuple(parts))
                parts = []

    def _receive(self, link: Link, run: int) -> Frame:
        """The next frame of this run; drops those of a run that was closed."""
        while (frame := link.receive()).run != run:
            pass
        return frame

    def _start(self) -> Link:
        with ExitStack() as both, ExitStack() as on_error:

            def closed_by(stack: ExitStack, *fds: int) -> tuple[int, ...]:
                for fd in fds:
                    stack.callback(os.close, fd)
                return fds

            ids, plans = (fd for _ in range(2) for fd in closed_by(both, open_shared_file(self._ring_bytes)))
            child_read, write_fd = os.pipe()
            read_fd, child_write = os.pipe()
            closed_by(both, child_read, child_write)
            closed_by(on_error, read_fd, write_fd)
            fds = child_read, child_write, ids, plans
            import_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bagpipe.lookahead.child", *map(str, (*fds, os.getpid()))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the training process
                env={**os.environ, "PYTHONPATH": import_path, "OPENBLAS_NUM_THREADS": "1"},
            )
            self._link = link = Link(
                read_fd=read_fd,
                write_fd=write_fd,
                in_fd=plans,
                out_fd=ids,
                is_alive=lambda: process.poll() is None,
            )
            on_error.pop_all()
        return link

    def _end(self) -> str:
        """End the process. Returns how it ended."""
        link, process, self._link, self._process = self._link, self._process, None, None
        if link is None or process is None:
            return ""
        link.close()
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
