"""`RemotePlanner`: plans in a running cacher, on this machine or another one.

    training process                         cacher: one thread per planner
    batches ──ids──> Plan stream ──────────> window ──plan──┐
    RankBatch <──decode── Plan stream <─────────────────────┘

The cacher holds the state of a run: its window, and what is in the caches. It is gone with the connection, so a lost
connection ends the run with one error, and the job resumes from its checkpoint. The next run connects anew.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable

from bagpipe.client.access import Cacher
from bagpipe.client.codec import CodecError
from bagpipe.client.link import Credentials, LinkLost
from bagpipe.config.sections import CacherConfig
from bagpipe.errors import InputError, JobError
from bagpipe.lookahead.frames import FramedPlan
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.planning import in_order
from bagpipe.lookahead.protocol import SLACK, requested_plans
from bagpipe.lookahead.stream_link import StreamLink
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch

__all__ = ["RemotePlanner"]

#: The delay between attempts to reach a cacher doubles from the first to the last.
_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 1.0

#: A cacher counts the streams of a process, such as those of training and of evaluation, as one job.
_JOB_ID = secrets.token_hex(16)


class _RemotePlan(FramedPlan):
    """A plan whose bytes come from another process's memory."""

    def part(self, rank: int, batch: Batch) -> RankBatch:
        """See `GlobalPlan`.

        Raises:
            JobError: the bytes are not a plan.
        """
        try:
            return super().part(rank, batch)
        except CodecError as error:
            raise _unreadable(error) from None


class RemotePlanner(WindowPlanner):
    """Plans in a cacher. Entering connects.

    Args:
        spec: what to plan for.
        cacher: where, and how to prove that this process may.
        slack: batches read beyond the window.

    Raises:
        InputError: `spec` cannot be planned for. Entering: the cacher is not reached, or refuses this process.
        JobError: entering: the cacher has no room for another job, or what listens is no cacher. `run`: the cacher is
            gone.
    """

    def __init__(self, spec: OracleSpec, cacher: Cacher, *, slack: int = SLACK) -> None:
        super().__init__(spec)
        self._cacher = cacher
        self._address = cacher.address()
        self._slack = slack
        self._credentials: Credentials | None = None
        self._link: StreamLink | None = None
        self._run_number = 0
        self._is_running = False

    @property
    def max_held(self) -> int:
        """See `BatchPlanner`: the window and the slack."""
        return (self.spec.lookahead if self.spec.num_slots else 1) + self._slack

    def open(self) -> None:
        """Connect."""
        access = self._cacher
        self._credentials = Credentials.read(
            CacherConfig(
                secret_file=access.secret_file, tls_ca=access.tls_ca, tls_cert=access.tls_cert, tls_key=access.tls_key
            )
        )
        self._link = self._connect(self._credentials, InputError)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._credentials = None
        self._hang_up()

    def plan_all(
        self, batches: Iterable[Batch], first_batch: int, on_batch: Callable[[Batch], object]
    ) -> Generator[FramedPlan, None, None]:
        """See `WindowPlanner`.

        Raises:
            RuntimeError: outside the context, or while another run is open.
            JobError: the cacher is gone, has failed, or does not keep to the protocol.
        """
        if self._credentials is None or self._is_running:
            raise RuntimeError("a remote planner is for one run at a time, inside its `with` block")
        self._is_running = True
        self._run_number = run = (self._run_number + 1) % (1 << 32)
        try:
            if self._link is None:
                self._link = self._connect(self._credentials, JobError)
            plans = requested_plans(
                self._link, run, self.spec, in_order(batches, first_batch), on_batch, max_held=self.max_held
            )
            error = yield from _remote(plans)
        except GeneratorExit:
            raise
        except LinkLost as lost:
            self._hang_up()
            raise JobError(
                f"the cacher at {self._address}, which plans for this job, is gone ({lost}): start it again, and "
                "resume the job from its checkpoint"
            ) from None
        except CodecError as raised:
            self._hang_up()
            raise _unreadable(raised) from None
        except BaseException:
            self._hang_up()
            raise
        finally:
            self._is_running = False
        if error is not None:
            raise error

    def _connect(self, credentials: Credentials, unreached: type[Exception]) -> StreamLink:
        """A stream that the cacher has accepted.

        Raises:
            Exception: of type `unreached`, if the cacher was not reached in time.
            InputError, JobError: it refused.
        """
        deadline_s = time.monotonic() + self._cacher.timeout_s
        delay_s, waits = _FIRST_DELAY_S, threading.Event()
        while True:
            link = StreamLink(self._address, credentials, _JOB_ID)
            try:
                link.await_welcome(max(deadline_s - time.monotonic(), delay_s))
            except LinkLost as lost:
                link.close()
                if time.monotonic() + delay_s > deadline_s:
                    raise unreached(
                        f"the cacher at {self._address} was not reached within {self._cacher.timeout_s:g} s: {lost}"
                    ) from None
            except BaseException:
                link.close()
                raise
            else:
                return link
            waits.wait(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


def _remote(
    plans: Generator[FramedPlan, None, Exception | None],
) -> Generator[FramedPlan, None, Exception | None]:
    """The plans, with errors of their bytes as JobErrors."""
    try:
        while True:
            yield _RemotePlan(parts=next(plans).parts)
    except StopIteration as ended:
        error: Exception | None = ended.value
        return error
    finally:
        plans.close()


def _unreadable(error: CodecError) -> JobError:
    return JobError(f"the cacher sent something that cannot be read: {error}")
