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
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack

from bagpipe.errors import JobError
from bagpipe.lookahead.frames import FramedPlan
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.link import Link, LinkClosed
from bagpipe.lookahead.planning import in_order
from bagpipe.lookahead.protocol import SLACK, requested_plans
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch
from bagpipe.util.priority import lower_process_priority
from bagpipe.util.programs import module_command, module_environment
from bagpipe.util.shared_file import open_shared_file

__all__ = ["RING_BYTES", "PlannerProcess"]

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
        self._run_number = run = (self._run_number + 1) % (1 << 32)
        try:
            # The link is no local variable: a traceback would keep its files open.
            error = yield from requested_plans(
                self._link or self._start(),
                run,
                self.spec,
                in_order(batches, first_batch),
                on_batch,
                max_held=self.max_held,
            )
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
            self._process = process = subprocess.Popen(
                [*module_command("bagpipe.lookahead.child"), *map(str, (*fds, os.getpid()))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the training process
                env={**module_environment(), "OPENBLAS_NUM_THREADS": "1"},
            )
            lower_process_priority(process)
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
