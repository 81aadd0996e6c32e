from __future__ import annotations

from bagpipe.oracle.plan import NO_BATCH
from bagpipe.oracle.versions import Seen, Versions


def used_at(*batches: int, push_now: bool = False) -> Versions:
    """One row, fetched as new and used by these batches."""
    versions = Versions()
    assert versions.fetch("row", after=NO_BATCH, unread=True) == Seen(0, 0)
    for batch in batches:
        versions.update("row", batch, push_now=push_now)
    return versions


def test_an_early_pull_misses_the_update_of_the_previous_batch() -> None:
    assert used_at(0, 1).pull("row", 2, now=False) == Seen(1, 2)
    assert not used_at(0, 1).pull("row", 3, now=False).is_stale


def test_a_pull_after_the_previous_batch_sees_its_synced_rows() -> None:
    assert used_at(0, 1, push_now=True).pull("row", 2, now=True) == Seen(2, 2)
    assert used_at(0, 1, push_now=False).pull("row", 2, now=True) == Seen(1, 2)


def test_an_eviction_sees_the_updates_it_waits_for() -> None:
    assert used_at(0, 3).evict("row", 5, after=2) == Seen(1, 2)
    assert not used_at(0, 3).evict("row", 5, after=3).is_stale


def test_a_fetch_sees_the_evictions_it_waits_for() -> None:
    for after, found in ((4, 0), (5, 2)):
        versions = used_at(0, 3)
        versions.evict("row", 5, after=3)
        assert versions.fetch("row", after=after, unread=False) == Seen(found, 2)
    versions = used_at(0)
    versions.evict("row", 5, after=3)
    assert versions.fetch("row", after=9, unread=True).is_stale
