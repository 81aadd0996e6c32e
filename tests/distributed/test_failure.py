from __future__ import annotations

import queue

import pytest
from torch._C._distributed_c10d import HashStore

from bagpipe.distributed.failure import GRACE_S, HEARTBEAT_S, Failure, Failures, Watcher
from bagpipe.errors import CapacityError, InputError, JobError, PeerError, StoreError


@pytest.mark.parametrize(
    ("error", "exit_code", "message", "kind"),
    [
        (InputError("day_3.tsv:7: 39 columns"), 2, "day_3.tsv:7: 39 columns", InputError),
        (CapacityError("batch 4 needs\n 9 rows"), 2, "batch 4 needs 9 rows", InputError),
        (StoreError("read failed"), 1, "read failed", PeerError),
        (JobError("digests differ"), 1, "digests differ", PeerError),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero", PeerError),
        (SystemExit(130), 130, "SystemExit: 130", SystemExit),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt: ", SystemExit),
    ],
)  # fmt: skip
def test_errors_of_other_ranks(error: BaseException, exit_code: int, message: str, kind: type[BaseException]) -> None:
    failure = Failure.of(2, error)
    assert failure == Failure(rank=2, exit_code=exit_code, message=message)
    learned = failure.error()
    assert type(learned) is kind
    if kind is SystemExit:
        assert isinstance(learned, SystemExit)
        assert learned.code == 130
    else:
        assert str(learned) == f"rank 2: {message}"


def test_a_forwarded_error_keeps_its_original_rank() -> None:
    first = Failure.of(1, InputError("bad column"))
    passed_on = Failure.of(0, first.error())
    assert str(passed_on.error()) == "rank 1: bad column"
    assert passed_on.is_same(first)
    assert first.is_same(Failure.of(2, InputError("bad column")))
    assert not first.is_same(Failure.of(2, InputError("another column")))


def ranks(count: int) -> list[Failures]:
    store = HashStore()
    return [Failures(store, rank, count) for rank in range(count)]


def test_the_first_error_wins() -> None:
    first, second, third = ranks(3)
    assert third.poll() is None
    second.report(InputError("bad column"))
    first.report(StoreError("the store went away, since rank 1 had started it"))
    for other in (first, third):
        assert other.poll() == Failure(rank=1, exit_code=2, message="bad column")
    assert second.poll() is None, "a rank does not receive its own error"
    assert second.known is None
    assert str(second.end()) == "this rank has failed, so it waits for no other"
    assert str(third.end()) == "rank 1: bad column"
    assert ranks(1)[0].end() is None


def test_a_failed_exchange_reports_the_reported_error() -> None:
    first, second = ranks(2)
    second.report(InputError("bad column"))
    assert str(first.explain("pull lane: closed")) == "rank 1: bad column"
    assert isinstance(first.explain("pull lane: closed"), InputError)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the heartbeat and the grace period."""
    monkeypatch.setattr("bagpipe.distributed.failure.HEARTBEAT_S", HEARTBEAT_S / 5)
    monkeypatch.setattr("bagpipe.distributed.failure.GRACE_S", GRACE_S / 2)


def test_a_failed_exchange_reports_the_dead_rank(quick: None) -> None:
    first, second, _ = ranks(3)
    first.heartbeat()
    second.heartbeat()
    error = first.explain("pull lane: waited for 3 rows: closed")
    assert str(error) == "lost ranks 1, 2, dead or stopped (pull lane: waited for 3 rows: closed)"
    assert isinstance(error, PeerError)
    with Watcher(second, lambda error: None):
        assert str(first.explain("closed")).startswith("lost rank 2, ")


def test_healthy_ranks_explain_no_failure(quick: None) -> None:
    first, second = ranks(2)
    with Watcher(second, lambda error: None):
        assert first.explain("a full disk") is None


def test_a_rank_that_left_is_named() -> None:
    first, second = ranks(2)
    second.leave()
    assert str(first.explain("closed")) == "rank 1 left the job too early (closed)"


def test_the_watcher_reports_a_failure_once(quick: None) -> None:
    first, second = ranks(2)
    reported: queue.Queue[BaseException] = queue.Queue()
    with Watcher(first, reported.put):
        second.report(StoreError("no answer"))
        assert str(reported.get(timeout=250)) == "rank 1: no answer"
    assert reported.empty()


def test_the_watcher_reports_what_its_own_check_finds(quick: None) -> None:
    (only,) = ranks(1)
    reported: queue.Queue[BaseException] = queue.Queue()
    with Watcher(only, reported.put, lambda: PeerError("the device hangs")):
        assert str(reported.get(timeout=250)) == "the device hangs"


class _GoneStore:
    """A TCPStore whose server is gone."""

    def __getattr__(self, name: str) -> object:
        def fail(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


def test_a_lost_keystore_is_a_separate_error() -> None:
    failures = Failures(_GoneStore(), 0, 2)
    assert "lost the job's key-value store" in str(failures.explain("closed"))
    reported: queue.Queue[BaseException] = queue.Queue()
    with Watcher(failures, reported.put):
        assert "lost the job's key-value store" in str(reported.get(timeout=250))
    failures.report(JobError("no other rank"))
    failures.leave()
    failures.await_leavers(10.0)


def test_the_host_of_the_store_leaves_last() -> None:
    first, second = ranks(2)
    first.leave()
    second.leave()
    first.await_leavers(3600.0)  # longer than any test may take
