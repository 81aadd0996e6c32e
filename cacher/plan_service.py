"""`PlanService`: one `Plan` call per planner of a job that brings its own batches.

    PlanHello ─> admission ─> PlanWelcome      pieces ──FrameJoiner──> PlanStream (planner thread) ──> pieces

Requests are untrusted. The state of a planner is that of its stream: when the stream ends, the planner does. The
streams of one process are one job, which ends with the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import MAX_IDS_BYTES, job_label
from bagpipe.client.codec import CodecError
from bagpipe.errors import JobError
from bagpipe.lookahead.pieces import FrameJoiner
from cacher.admission import Admission, made_room
from cacher.calls import Calls, ProtocolError, kind_of, move, receive, send_messages
from cacher.counters import Counters
from cacher.plan_requests import CheckedIntake
from cacher.plan_stream import PlanStream
from cacher.requests import check_name, check_protocol
from cacher.security import check_client, client_of

__all__ = ["MAX_STREAMS_OF_JOB", "PlanService"]

_LOG = logging.getLogger("cacher")

#: A job has one stream for training and one for evaluation. Those that are ending count too.
MAX_STREAMS_OF_JOB = 8
#: Planner threads of streams that have ended, of all jobs.
_MAX_ENDING = 16


@dataclass(slots=True, kw_only=True, eq=False)
class _PlanJob:
    """The streams of one training process.

    Attributes:
        label: of the job, for logs.
        client: of its first stream, see `cacher.security.client_of`.
        since_s: when its first stream came, by `time.monotonic`.
        has_begun: some stream has asked for something.
        error: why the daemon has ended its streams.
        tasks: the calls of its streams.
    """

    label: str
    client: tuple[str, ...]
    since_s: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    error: JobError | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class PlanService:
    """The `Plan` method of the `bagpipe.v1.Cacher` service.

    Args:
        admission: of the daemon.
        calls: of the service.
        counters: totals for the metrics.
        max_bytes: memory that each planner and its window may take.
    """

    def __init__(self, admission: Admission, calls: Calls, counters: Counters, *, max_bytes: int) -> None:
        self._admission = admission
        self._calls = calls
        self._counters = counters
        self._max_bytes = max_bytes
        self._jobs: dict[str, _PlanJob] = {}  # by id
        admission.can_make_room(self._end_idle_job)
        self._ending: list[PlanStream] = []

    @property
    def num_streams(self) -> int:
        """Planners at work."""
        return sum(len(job.tasks) for job in self._jobs.values())

    def ending(self) -> list[PlanStream]:
        """Streams that have ended, whose threads have not."""
        self._ending = [stream for stream in self._ending if not stream.join(0)]
        return self._ending

    async def plan(self, requests: object, context: Any) -> None:
        """Serve one call."""
        await self._calls.answer(context, self._serve(context), lambda error: pb.PlanReply(error=error))

    async def _serve(self, context: Any) -> None:
        hello = (await self._calls.first(context, pb.PlanRequest)).hello
        check_protocol(hello.protocol)
        check_name("job id", hello.job_id)
        job = self._enter(hello.job_id, client_of(context))
        intake = partial(CheckedIntake, max_bytes=self._max_bytes, counters=self._counters)
        stream = PlanStream(f"cacher-plans-{job_label(hello.job_id)}", intake, self._counters)
        try:
            stream.start()
            self._counters.add(streams=1)
            await context.write(pb.PlanReply(welcome=pb.PlanWelcome()).SerializeToString())
            await move(_read(stream, context, job), send_messages(stream, context))
        except asyncio.CancelledError:
            if job.error is None:
                raise
            task = asyncio.current_task()
            assert task is not None, "calls are tasks"
            task.uncancel()  # by the daemon, which goes on to tell the trainer
            raise job.error from None
        finally:
            stream.close()
            self._ending.append(stream)
            self._leave(job)
        if isinstance(stream.error, CodecError):
            raise ProtocolError(str(stream.error))
        if stream.error is not None:
            raise stream.error

    def _enter(self, job_id: str, client: tuple[str, ...]) -> _PlanJob:
        if len(self.ending()) >= _MAX_ENDING:
            raise JobError(f"the cacher is still ending {len(self._ending)} planners, at most {_MAX_ENDING}")
        job = self._jobs.get(job_id)
        if job is None:
            self._admission.enter()
            job = self._jobs[job_id] = _PlanJob(label=job_label(job_id), client=client)
            _LOG.info("plan job started", extra={"job": job.label})
        check_client(job.label, job.client, client)
        if len(job.tasks) >= MAX_STREAMS_OF_JOB:
            raise JobError(f"the job has {len(job.tasks)} planners already, at most {MAX_STREAMS_OF_JOB}")
        task = asyncio.current_task()
        assert task is not None, "calls are tasks"
        job.tasks.add(task)
        return job

    def _leave(self, job: _PlanJob) -> None:
        """The stream of this call has ended."""
        task = asyncio.current_task()
        if task in job.tasks:
            job.tasks.remove(task)
            if not job.tasks:
                self._end(job)

    def _end(self, job: _PlanJob) -> None:
        self._jobs = {job_id: other for job_id, other in self._jobs.items() if other is not job}
        self._admission.leave()
        _LOG.info("plan job ended", extra={"job": job.label})

    def _end_idle_job(self, start_timeout_s: float) -> bool:
        """End the oldest job that has asked for nothing in this time. False if there is none."""
        for job in self._jobs.values():
            if not job.has_begun and time.monotonic() - job.since_s >= start_timeout_s:
                job.error = made_room(start_timeout_s)
                for task in job.tasks:
                    task.cancel()
                job.tasks.clear()
                self._end(job)
                return True
        return False


async def _read(stream: PlanStream, context: Any, job: _PlanJob) -> None:
    joiner = FrameJoiner(MAX_IDS_BYTES)
    while (message := await receive(context, pb.PlanRequest)) is not None:
        job.has_begun = True
        if message.WhichOneof("kind") != "piece":
            raise ProtocolError(f"expected a piece of a frame, got {kind_of(message)}")
        try:
            frame = joiner.add(message.piece)
        except CodecError as error:
            raise ProtocolError(str(error)) from None
        while frame is not None and not stream.put(frame):
            await stream.has_room.wait()
