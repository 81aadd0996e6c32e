"""A runner in a job of several ranks: agreed stops, and errors of one rank end all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bagpipe.errors import JobError
from bagpipe.pipeline.lane import EndOfBatches
from bagpipe.pipeline.runner import Runner
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from tests.pipeline.loops import Handlers

LOOP = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, ranks=2)
OPS = tuple({template.op for _, template in LOOP.templates})
HAZARDS = {name: lambda b: b - 3 for name in ("fetch_after", "evict_after", "ready_after")}


def handlers(num_batches: int | None = None, **special: Callable[[int], None]) -> Handlers:
    def read(batch: int) -> None:
        if batch == num_batches:
            raise EndOfBatches

    return {**dict.fromkeys(OPS, lambda index: None), "X_READ": read, **special}


def test_ranks_that_agree_stop_before_the_same_batch() -> None:
    """The source votes once per batch, and the result of the vote overrides the local request."""
    wishes: list[bool] = []

    def agree(stop: bool) -> bool:
        wishes.append(stop)
        return len(wishes) > 3  # another rank stops before batch 3

    report = Runner(LOOP, handlers(9), HAZARDS, agree=agree).run()
    assert (report.batches, report.stopped, wishes) == (3, True, [False] * 4)

    wishes.clear()
    runner = Runner(LOOP, handlers(2), HAZARDS, agree=lambda stop: bool(wishes.append(stop)))
    runner.request_stop()
    report = runner.run()
    assert (report.batches, report.stopped, wishes) == (2, True, [True] * 3)


def test_an_error_from_outside_ends_the_run() -> None:
    inside, ended = threading.Event(), threading.Event()

    def forward(index: int) -> None:
        inside.set()
        assert ended.wait(30)

    def fail() -> None:
        assert inside.wait(30)
        runner.abort(JobError("rank 1: its error"))
        ended.set()

    runner = Runner(LOOP, handlers(None, F=forward), HAZARDS)
    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(JobError, match="rank 1: its error"):
        runner.run()
    thread.join()


def test_an_error_is_reported_immediately_and_once() -> None:
    """The error is reported while another lane is still in a handler that waits for a peer."""
    reported: list[tuple[str, str]] = []
    inside, was_reported = threading.Event(), threading.Event()

    def tell(error: BaseException) -> None:
        reported.append((str(error), threading.current_thread().name))
        was_reported.set()

    def forward(index: int) -> None:
        inside.set()
        assert was_reported.wait(30)
        raise JobError("a consequence")

    def get(batch: int) -> None:
        if batch == 1:
            assert inside.wait(30)
            raise JobError("no answer")

    with pytest.raises(JobError, match="no answer"):
        Runner(LOOP, handlers(None, F=forward, X_FETCH=get), HAZARDS, on_error=tell).run()
    assert reported == [("no answer", "bagpipe-net-in")]


def test_an_error_from_outside_is_known_already() -> None:
    reported: list[BaseException] = []

    def read(batch: int) -> None:
        runner.abort(JobError("rank 1: its error"))

    runner = Runner(LOOP, handlers(None, X_READ=read), HAZARDS, on_error=reported.append)
    with pytest.raises(JobError, match="rank 1: its error"):
        runner.run()
    assert reported == []
