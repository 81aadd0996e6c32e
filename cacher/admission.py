"""`Admission`: how many jobs a daemon serves at a time, and whether it takes new ones. For the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bagpipe.errors import JobError

__all__ = ["Admission", "made_room"]


def made_room(start_timeout_s: float) -> JobError:
    """The error of a job that was ended for another."""
    return JobError(f"the job asked for nothing in {start_timeout_s:g} s and made room for another")


class Admission:
    """Counts jobs: those that get batches from the cacher's data, and those that bring their own.

    Args:
        max_jobs: most concurrent jobs.
        start_timeout_s: a job that has asked for nothing in this time makes room for another.
    """

    def __init__(self, max_jobs: int, *, start_timeout_s: float) -> None:
        self._max_jobs = max_jobs
        self._start_timeout_s = start_timeout_s
        self._room_makers: list[Callable[[float], bool]] = []
        self._num_jobs = 0
        self._is_draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_jobs(self) -> int:
        """Jobs served now."""
        return self._num_jobs

    @property
    def is_draining(self) -> bool:
        """No new jobs are taken."""
        return self._is_draining

    def can_make_room(self, make: Callable[[float], bool]) -> None:
        """Register a function that ends a job which has asked for nothing in so many seconds, if there is one."""
        self._room_makers.append(make)

    def enter(self) -> None:
        """Admit a job.

        Raises:
            JobError: no room, or the daemon is shutting down.
        """
        if self._is_draining:
            raise JobError("the cacher is shutting down and takes no new jobs")
        if self._num_jobs >= self._max_jobs and not any(make(self._start_timeout_s) for make in self._room_makers):
            raise JobError(f"the cacher serves {self._num_jobs} jobs already, at most {self._max_jobs}")
        self._num_jobs += 1
        self._empty.clear()

    def leave(self) -> None:
        """A job has ended."""
        self._num_jobs -= 1
        if not self._num_jobs:
            self._empty.set()

    def drain(self) -> None:
        """Refuse new jobs."""
        self._is_draining = True

    async def wait_empty(self) -> None:
        """Wait until all jobs have ended."""
        await self._empty.wait()
