from __future__ import annotations

from data.replay.recommendation import recommend
from data.replay.records import ReplayRecord


def record(policy: str, lookahead: int, cache_rows: int, megabytes: float, **values: object) -> ReplayRecord:
    """The record of a setting with this traffic."""
    settings = {"batch_size": 10, "world_size": 1, "bytes_fetched": 0, "bytes_written": int(megabytes * 1e6)}
    return ReplayRecord(policy=policy, lookahead=lookahead, cache_rows=cache_rows, **(settings | values))  # type: ignore[arg-type]


def test_the_smallest_cache_then_the_shortest_window_that_cost_little_more() -> None:
    found = recommend(
        [
            record("belady-window", 8, 100, 250),
            record("belady-window", 32, 100, 200),
            record("belady-window", 8, 200, 140),
            record("belady-window", 32, 200, 109),
            record("belady-window", 64, 200, 108),
            record("belady-window", 64, 400, 100),
            record("drop-unused", 32, 200, 109.5),
        ]
    )
    assert found is not None
    assert (found.setting.policy, found.setting.lookahead, found.setting.cache_rows) == ("belady-window", 32, 200)
    assert found.reason == (
        "belady-window with 200 rows per rank and a window of 32 batches moves 1.090 times the fewest bytes of all "
        "(109.0 MB); the next smaller cache (100 rows) 2.000 times and the next shorter window (8) 1.400 times."
    )


def test_a_single_record_is_recommended() -> None:
    found = recommend([record("drop-unused", 8, 100, 2.5)])
    assert found is not None
    assert found.reason.endswith("moves the fewest bytes of all (2.5 MB).")


def test_only_what_can_be_trained_with_counts() -> None:
    assert recommend([record("lru", 8, 100, 1), record("drop-unused", 8, 100, 1, error="too small")]) is None
    assert recommend([]) is None
    found = recommend([record("offline-belady", 8, 10, 1), record("drop-unused", 8, 100, 3)])
    assert found is not None
    assert found.setting.policy == "drop-unused"


def test_batch_sizes_are_not_compared() -> None:
    found = recommend([record("drop-unused", 8, 100, 3), record("drop-unused", 8, 50, 1, batch_size=20)])
    assert found is not None
    assert found.setting.batch_size == 10
