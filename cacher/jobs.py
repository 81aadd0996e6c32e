"""`Jobs`: the jobs served, with their ranks and runs by job id. Runs on the event loop's thread only.

    Hello ──enter──> Member of a Job (made by its first rank)     Start ──begin──> Run, one for all ranks of the job
    Leave ──leave──> the rank is done                             lost connection ──lose──> wait grace_s, then give up

A job ends when every rank that entered has left. A rank belongs to one trainer process. If the same process reconnects,
its new stream replaces the broken one. Another process is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import first_difference, job_label
from bagpipe.errors import InputError, JobError
from cacher.admission import Admission, made_room
from cacher.counters import Counters
from cacher.planned_phase import PlannedPhase
from cacher.planning import PlannedData
from cacher.requests import PhaseRequest, check_hello, parse_start
from cacher.run import Run
from cacher.security import check_client

__all__ = ["EnteredRun", "Jobs", "Member"]

_LOG = logging.getLogger("cacher")

#: Concurrent runs of a job: ranks can be in neighbouring phases. Each run has a planner.
_MAX_RUNS = 3
#: Abandoned runs whose planner threads have not ended yet, of all jobs.
_MAX_ENDING_RUNS = 16
#: Ids of failed jobs that are kept.
_MAX_REMEMBERED = 1000


class Stream(Protocol):
    """A rank's connection."""

    def wake(self) -> None:
        """Check for something to send."""

    def fail(self, error: Exception) -> None:
        """Send the error and end."""

    def replaced(self) -> None:
        """End silently: the rank has a new stream."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One rank of a job.

    Attributes:
        rank: its number.
        instance: of the trainer process.
        credits: batches that it accepts beyond those acknowledged.
        stream: its connection; None while lost.
        run: number of its current or next run; -1 before the first.
        left: it is done.
        giving_up: timer, active while the rank is lost.
    """

    job: Job
    rank: int
    instance: str
    credits: int
    stream: Stream | None = None
    run: int = -1
    left: bool = False
    giving_up: asyncio.TimerHandle | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A training job: its ranks by number; its runs and their requests by number.

    Attributes:
        job_id: what its ranks share. Whoever knows it may enter as one of them, so it is in no log and no metric.
        label: stands for it there.
        since_s: when its first rank came, by `time.monotonic`.
        world_size: number of its ranks.
        client: of its first rank, see `cacher.security.client_of`.
    """

    job_id: str = field(repr=False)
    label: str
    world_size: int
    client: tuple[str, ...] = ()
    since_s: float = field(default_factory=time.monotonic)
    members: dict[int, Member] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    requests: dict[int, PhaseRequest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredRun:
    """A run that a rank has entered: its number in the job, and the batch to send first."""

    run: Run
    number: int
    next_batch: int


class Jobs:
    """All jobs of a daemon.

    Args:
        data: of all jobs; None: there are none.
        settings: the configuration every trainer must share, see `bagpipe.client.agreement`.
        admission: of the daemon.
        grace_s: how long to wait for a lost rank.
        counters: totals for the metrics.
    """

    def __init__(
        self,
        data: PlannedData | None,
        settings: Mapping[str, Any],
        *,
        admission: Admission,
        grace_s: float,
        counters: Counters,
    ) -> None:
        self._data = data
        self._settings = settings
        self._admission = admission
        self._grace_s = grace_s
        self._counters = counters
        self._jobs: dict[str, Job] = {}
        self._ending: list[Run] = []
        self._failed: dict[str, str] = {}  # reasons by job id
        admission.can_make_room(self._end_idle_job)

    def enter(self, hello: pb.Hello, stream: Stream, client: tuple[str, ...] = ()) -> Member:
        """Add a rank to a new or known job, or replace its stream.

        Args:
            hello: of the rank.
            stream: its connection.
            client: see `cacher.security.client_of`.

        Raises:
            InputError: it does not match the cacher's configuration or the job's other ranks, or is another client.
            JobError: no room for another job, or this job has failed.
        """
        check_hello(hello, self._settings, self._known_data.schema)
        if hello.job_id in self._failed:
            raise JobError(f"the job was given up: {self._failed[hello.job_id]}")
        job = self._jobs.get(hello.job_id)
        if job is None:
            job = self._add(hello, client)
        check_client(job.label, job.client, client)
        if job.world_size != hello.world_size:
            raise InputError(
                f"world size: the job's other ranks have {job.world_size}, rank {hello.rank} has {hello.world_size}"
            )
        member = job.members.get(hello.rank)
        if member is None:
            member = Member(job=job, rank=hello.rank, instance=hello.instance, credits=hello.credits)
            job.members[hello.rank] = member
        elif member.instance != hello.instance:
            raise InputError(f"rank {hello.rank} of job {job.label} belongs to another process")
        elif member.stream is not None:
            member.stream.replaced()
        if member.giving_up is not None:
            member.giving_up.cancel()
            member.giving_up = None
        member.credits = hello.credits
        member.stream = stream
        member.left = False
        return member

    def begin(self, member: Member, start: pb.Start) -> EnteredRun | None:
        """Enter the requested run. The first rank of the job to request it starts it. None if the rank has finished it.

        Raises:
            InputError: the run cannot be planned, differs from the other ranks' request, or the batch is gone.
            JobError: too many concurrent runs.
        """
        job = member.job
        if member.left:
            raise JobError("the job has ended")
        request = parse_start(start, settings=self._settings, schema=self._known_data.schema, world_size=job.world_size)
        if start.ended:
            member.run = max(member.run, start.run + 1)
            self._leave_runs(member, below=member.run)
            return None
        if start.run < member.run:
            raise InputError(f"run {start.run}: rank {member.rank} is in run {member.run} already")
        known = job.requests.get(start.run)
        if known is not None:
            found = first_difference(known.to_json(), request.to_json())
            if found is not None:
                raise InputError(
                    f"run {start.run}, {found.path}: the job's other ranks request {found.first}, "
                    f"rank {member.rank} requests {found.second}"
                )
        member.run = start.run
        self._leave_runs(member, below=start.run)
        run = job.runs.get(start.run)
        if run is None and start.next_batch > start.first_batch and self._known_data.is_stream:
            raise JobError("the cacher was started again, and plans of a stream cannot be made twice: resume the job")
        if run is None:
            run = self._start_run(job, start.run, request, member.credits)
            if start.next_batch > start.first_batch:
                # The ranks come from a previous cacher. Those that had left it will not enter here.
                asyncio.get_running_loop().call_later(self._grace_s, _drop_absent_ranks, job, run)
        entered = run.enter(member.rank, credits=member.credits, next_batch=start.next_batch, watermark=start.watermark)
        if not entered:
            raise InputError(f"run {start.run}: rank {member.rank} asks for batch {start.next_batch} again, it is gone")
        return EnteredRun(run=run, number=start.run, next_batch=start.next_batch)

    def leave(self, member: Member, stream: Stream) -> None:
        """A rank is done."""
        if member.stream is stream:
            self._retire(member)

    def lose(self, member: Member, stream: Stream) -> None:
        """A rank's stream ended without a Leave. The rank can reconnect."""
        if member.stream is not stream:
            return  # it has reconnected already
        member.stream = None
        loop = asyncio.get_running_loop()
        member.giving_up = loop.call_later(self._grace_s, self._give_up, member)
        _LOG.info("rank lost", extra={"job": member.job.label, "rank": member.rank, "grace_s": self._grace_s})

    def stop(self) -> list[Run]:
        """End all jobs. Returns the runs whose threads are alive."""
        for job in list(self._jobs.values()):
            for member in list(job.members.values()):
                self._retire(member)
        return [run for run in self._ending if not run.join(0)]

    def runs(self) -> list[tuple[str, int, Run]]:
        """Label of the job, run number and run of all current runs."""
        return [(job.label, number, run) for job in self._jobs.values() for number, run in job.runs.items()]

    @property
    def _known_data(self) -> PlannedData:
        assert self._data is not None, "a daemon without data has no jobs"
        return self._data

    def counts(self) -> tuple[int, int]:
        """Number of jobs and of connected ranks. From any thread."""
        members = [member for job in list(self._jobs.values()) for member in list(job.members.values())]
        return len(self._jobs), sum(member.stream is not None for member in members)

    def _add(self, hello: pb.Hello, client: tuple[str, ...]) -> Job:
        self._admission.enter()
        job = Job(job_id=hello.job_id, label=job_label(hello.job_id), world_size=hello.world_size, client=client)
        self._jobs[job.job_id] = job
        _LOG.info("job started", extra={"job": job.label, "world_size": job.world_size})
        return job

    def _end_idle_job(self, start_timeout_s: float) -> bool:
        """End the oldest job that has asked for nothing in this time. False if there is none."""
        for job in self._jobs.values():
            members = list(job.members.values())
            if time.monotonic() - job.since_s < start_timeout_s or any(member.run >= 0 for member in members):
                continue
            streams = [member.stream for member in members if member.stream is not None]
            for member in members:
                self._retire(member)
            for stream in streams:
                stream.fail(made_room(start_timeout_s))
            return True
        return False

    def _start_run(self, job: Job, number: int, request: PhaseRequest, credits: int) -> Run:
        if len(job.runs) >= _MAX_RUNS:
            raise JobError(f"the job has {len(job.runs)} phases under way already, at most {_MAX_RUNS}")
        if len(self._ending) >= _MAX_ENDING_RUNS:
            raise JobError(f"the cacher is still ending {len(self._ending)} phases, at most {_MAX_ENDING_RUNS}")
        loop = asyncio.get_running_loop()

        def wake(rank: int) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, job, rank)

        run = Run(
            self._phase_of(request),
            number=number,
            world_size=job.world_size,
            first_batch=request.first_batch,
            credits=credits,
            wake=wake,
            counters=self._counters,
        )
        for member in job.members.values():
            if member.left or member.run > number:  # it finished this run with a previous cacher
                run.leave(member.rank)
        run.start()  # before the run is registered, because it can fail
        job.runs[number], job.requests[number] = run, request
        _LOG.info(
            "run started",
            extra={"job": job.label, "run": number, "phase": request.phase, "first_batch": request.first_batch},
        )
        return run

    def _phase_of(self, request: PhaseRequest) -> Callable[[], PlannedPhase]:
        return lambda: self._known_data.phase(
            request.phase,
            request.spec,
            max_steps=request.max_steps,
            first_batch=request.first_batch,
            reader_state=request.reader_state,
            known_rows=request.known_rows,
        )

    def _leave_runs(self, member: Member, below: int | None = None) -> None:
        job = member.job
        for number, run in list(job.runs.items()):
            if (below is None or number < below) and run.leave(member.rank):
                del job.runs[number]
                del job.requests[number]
                self._ending.append(run)
        self._ending = [run for run in self._ending if not run.join(0)]

    def _retire(self, member: Member) -> None:
        member.left = True
        member.stream = None
        if member.giving_up is not None:
            member.giving_up.cancel()
            member.giving_up = None
        self._leave_runs(member)
        job = member.job
        if all(other.left for other in job.members.values()) and self._jobs.get(job.job_id) is job:
            for run in job.runs.values():  # of ranks that never entered
                run.stop()
                self._ending.append(run)
            job.runs.clear()
            del self._jobs[job.job_id]
            _LOG.info("job ended", extra={"job": job.label})
            self._admission.leave()

    def _give_up(self, member: Member) -> None:
        """A lost rank did not reconnect: the job fails, and its other ranks get the error."""
        member.giving_up = None
        job = member.job
        error = JobError(f"rank {member.rank} was lost and not back within {self._grace_s:g} s")
        if job.world_size > 1:  # a rank that reconnects would start a new job and wait for the others
            self._failed.setdefault(job.job_id, str(error))
        if len(self._failed) > _MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        _LOG.warning("rank given up", extra={"job": job.label, "rank": member.rank, "grace_s": self._grace_s})
        self._retire(member)
        for other in list(job.members.values()):
            if other.stream is not None:
                other.stream.fail(error)


def _drop_absent_ranks(job: Job, run: Run) -> None:
    """Stop planning for ranks that never entered the job."""
    for rank in range(job.world_size):
        if rank not in job.members:
            run.leave(rank)


def _wake(job: Job, rank: int) -> None:
    member = job.members.get(rank)
    if member is not None and member.stream is not None:
        member.stream.wake()
