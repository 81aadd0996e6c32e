from __future__ import annotations

import dataclasses
import errno
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.errors import InputError, JobError
from bagpipe.oracle.plan import slots_of
from bagpipe.types.batch import Batch
from data.replay.baselines import run_baseline
from data.replay.options import Sweep, parse_sweep
from data.replay.records import Replay, ReplayRecord
from data.replay.row_batch_file import RowBatchFile
from data.replay.sweep import replay
from tests.data.replay.logs import write_log

ALL = "belady-window,drop-unused,lru,lfu,offline-belady,static-hot"
MORTAL = ("--data.expire_after", "5", "--data.expire_unit", "steps", "--data.expire_every", "3")


def plain(batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]:
    return batches


def sweep_of(path: Path, *flags: str) -> Sweep:
    return parse_sweep(["--data.path", str(path), "--data.format", "parquet", "--model.embedding_dim", "4", *flags])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def found(log: Path) -> Replay:
    flags = ("--data.batch_size", "60,100", "--lookahead", "1,4,10", "--cache_rows", "250,450,100000")
    return replay(sweep_of(log, *flags, "--policy", ALL), plain)


def test_one_record_per_combination_in_the_order_of_the_flags(found: Replay) -> None:
    places = [(record.batch_size, record.policy, record.lookahead, record.cache_rows) for record in found.records]
    assert places == [
        (batch_size, policy, lookahead, cache_rows)
        for batch_size in (60, 100)
        for policy in ALL.split(",")
        for lookahead in (1, 4, 10)
        for cache_rows in (250, 450, 100000)
    ]


@pytest.mark.multiproc
def test_any_number_of_processes_finds_the_same(log: Path, found: Replay) -> None:
    flags = ("--data.batch_size", "60,100", "--lookahead", "1,4,10", "--cache_rows", "250,450,100000")
    parallel = replay(sweep_of(log, *flags, "--policy", ALL, "--jobs", "2"), plain)

    def untimed(records: Iterable[ReplayRecord]) -> list[ReplayRecord]:
        return [dataclasses.replace(record, seconds=None, ids_per_s=None) for record in records]

    assert untimed(parallel.records) == untimed(found.records)
    assert (parallel.rows, parallel.skew, parallel.largest) == (found.rows, found.skew, found.largest)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_whole_log_as_oracle_reads_less_than_a_short_window(log: Path, jobs: str) -> None:
    flags = ("--data.batch_size", "60", "--lookahead", "2", "--cache_rows", "450")
    flags += ("--policy", "belady-window,belady-log,offline-belady")
    window, whole, optimum = replay(sweep_of(log, *flags, "--jobs", jobs), plain).records
    assert (whole.policy, whole.error) == ("belady-log", None)
    assert number(whole.rows_fetched) < number(window.rows_fetched)
    assert number(whole.rows_fetched) <= 1.1 * number(optimum.rows_fetched)


@pytest.fixture(scope="module")
def mortal(log: Path) -> Replay:
    flags = (*MORTAL, "--data.batch_size", "30,60", "--lookahead", "2", "--cache_rows", "200,700")
    return replay(sweep_of(log, *flags, "--policy", f"{ALL},belady-log"), plain)


def test_rows_that_expire_are_neither_read_nor_written(mortal: Replay) -> None:
    optimum = {
        (record.batch_size, record.cache_rows): number(record.rows_fetched)
        for record in mortal.records
        if record.policy == "offline-belady"
    }
    for record in mortal.records:
        assert record.error is None
        unique, born = number(record.rows_unique), number(record.rows_first_touch)
        fetched, written, deleted = (
            number(count) for count in (record.rows_fetched, record.rows_written, record.rows_deleted)
        )
        assert born > mortal.rows > born - deleted > 0
        assert born + fetched - deleted <= written <= born + fetched
        assert record.hit_rate == 1 - (born + fetched) / unique
        assert (record.bytes_fetched, record.bytes_written) == (32 * fetched, 32 * written)
        assert fetched >= optimum[record.batch_size, record.cache_rows]
        if record.cache_rows == 700 and record.policy in ("belady-window", "belady-log", "lru", "lfu"):
            assert (fetched, written) == (0, born - deleted)  # all live rows fit


@pytest.mark.parametrize("default_row", ["zero", "trained"])
def test_batch_sizes_admit_rows_each_in_its_own_way(log: Path, default_row: str) -> None:
    flags = ("--data.min_uses", "3", "--data.default_row", default_row, "--lookahead", "4", "--cache_rows", "450")
    flags += ("--policy", "belady-window,belady-log,offline-belady")
    # In a batch of all examples no row is admitted late, so sizes differ in ids and even in rows.
    sizes = ("600", "60", "50")
    together = replay(sweep_of(log, *flags, "--lookahead", "1", "--data.batch_size", ",".join(sizes)), plain).records
    alone = [replay(sweep_of(log, *flags, "--lookahead", "1", "--data.batch_size", size), plain) for size in sizes]
    records = [record for found in alone for record in found.records]
    assert [record.error for record in records] == [None] * 9
    for one, other in zip(together, records, strict=True):
        assert dataclasses.replace(one, seconds=0, ids_per_s=0) == dataclasses.replace(other, seconds=0, ids_per_s=0)
    assert len({record.ids for record in records}) == (3 if default_row == "zero" else 1)


def test_counts_fit_together(found: Replay) -> None:
    for record in good(found):
        unique, first = number(record.rows_unique), number(record.rows_first_touch)
        fetched, written = number(record.rows_fetched), number(record.rows_written)
        assert first == found.rows
        assert (written, record.rows_deleted) == (first + fetched, 0)
        assert record.hit_rate == 1 - written / unique
        assert (record.batches, record.ids) == (600 // record.batch_size, found.ids)
        assert record.row_bytes == 2 * 4 * 4  # weights and Adagrad's sums
        assert (record.bytes_fetched, record.bytes_written) == (32 * fetched, 32 * written)
        assert number(record.peak_rows) <= min(slots_of(record.cache_rows), found.rows)
        assert fetched == 0 or record.cache_rows < found.rows or record.policy in ("drop-unused", "static-hot")


def test_no_policy_misses_less_than_the_offline_optimum(found: Replay) -> None:
    for record in good(found):
        optimum = next(
            other
            for other in good(found)
            if other.policy == "offline-belady"
            and (other.batch_size, other.cache_rows) == (record.batch_size, record.cache_rows)
        )
        assert number(optimum.rows_fetched) <= number(record.rows_fetched)


def test_failed_settings_have_an_error_and_the_others_results(found: Replay, log: Path) -> None:
    failed = {(r.batch_size, r.policy, r.lookahead, r.cache_rows): r.error for r in found.records if r.error}
    longer = "--lookahead 10 is longer than the log: 6 batches of 100"
    assert failed[100, "drop-unused", 10, 450] == longer
    assert (100, "lru", 10, 450) not in failed  # this policy does not look ahead
    too_small = next(error for place, error in failed.items() if place[3] == 250 and place[2] == 1)
    assert too_small is not None
    assert too_small.startswith("batch ")
    assert "unique rows but --cache_rows is 250: raise it to at least" in too_small
    flags = ("--data.batch_size", "60", "--lookahead", "8", "--cache_rows", "450", "--policy", "typo,lru")
    other = replay(sweep_of(log, *flags), plain)
    assert [record.error is None for record in other.records] == [False, True]
    assert "got 'typo'" in str(other.records[0].error)


def test_the_reported_smallest_cache_works(log: Path) -> None:
    (small,) = replay(sweep_of(log, "--lookahead", "1", "--cache_rows", "5", "--policy", "drop-unused"), plain).records
    least = str(small.error).partition("at least ")[2].partition(",")[0]
    (found,) = replay(
        sweep_of(log, "--lookahead", "1", "--cache_rows", least, "--policy", "drop-unused"), plain
    ).records
    assert found.error is None


def test_defaults_fit_the_log(log: Path) -> None:
    """Caches that hold a batch, windows no longer than the log."""
    found = replay(sweep_of(log, "--data.batch_size", "30,600", "--policy", "lru,drop-unused"), plain)
    assert all(record.error is None for record in found.records)
    by_size = {size: [r for r in found.records if r.batch_size == size] for size in (30, 600)}
    assert {record.lookahead for record in by_size[30]} == {2, 8, 16}
    assert {record.lookahead for record in by_size[600]} == {1}
    assert {record.cache_rows for record in by_size[600]} == {found.rows}


def test_ranks_share_their_caches(log: Path) -> None:
    flags = ("--data.batch_size", "60", "--lookahead", "4", "--policy", "belady-window,lru")
    one = replay(sweep_of(log, *flags, "--cache_rows", "400"), plain).records
    two = replay(sweep_of(log, *flags, "--cache_rows", "200", "--world_size", "2"), plain).records
    assert two[0].rows_unique == one[0].rows_unique
    assert (one[0].exchange_rows, two[1].exchange_rows) == (0, None)  # a baseline's rows have no owners
    now = number(two[0].exchange_rows_now)
    assert 0 < now < number(two[0].exchange_rows)
    assert two[0].exchange_bytes_now == now * 4 * 4
    assert dataclasses.replace(two[1], seconds=0, ids_per_s=0, cache_rows=400, world_size=1) == dataclasses.replace(
        one[1], seconds=0, ids_per_s=0
    )


def test_bytes_are_exact_where_tables_differ(tmp_path: Path) -> None:
    path = write_log(tmp_path)
    schema = tmp_path / "wide.toml"
    schema.write_text((tmp_path / "schema.toml").read_text() + "\n[tables.item]\ndim = 6\n")
    flags = ("--data.schema", str(schema), "--lookahead", "4", "--cache_rows", "450", "--data.batch_size", "60")
    found = replay(sweep_of(path, *flags, "--policy", ALL), plain)
    user, item = 32, 48  # bytes of a row
    first = {table.table: table.rows for table in found.skew}
    for record in found.records:
        assert record.row_bytes is None
        rows = number(record.rows_written)
        items, rest = divmod(number(record.bytes_written) - user * rows, item - user)
        assert rest == 0
        assert first["item"] <= items <= rows - first["user"]
        read = user * (rows - items - first["user"]) + item * (items - first["item"])
        assert record.bytes_fetched == read


def test_the_same_log_gives_the_same_records(log: Path) -> None:
    flags = ("--data.batch_size", "60", "--lookahead", "4", "--cache_rows", "250", "--policy", ALL)
    first, second = (replay(sweep_of(log, *flags), plain).records for _ in range(2))
    times = {"seconds": None, "ids_per_s": None}
    for a, b in zip(first, second, strict=True):
        assert dataclasses.replace(a, **times) == dataclasses.replace(b, **times)  # type: ignore[arg-type]


def test_the_log_is_described(found: Replay) -> None:
    assert (found.examples, found.batches, found.format) == (600, 10, "parquet")
    assert sorted(table.table for table in found.skew) == ["item", "user"]
    assert sum(table.accesses for table in found.skew) == found.ids
    assert sum(table.rows for table in found.skew) == found.rows
    user = next(table for table in found.skew if table.table == "user")
    assert np.isclose(user.missing, 0.2, atol=0.06)


def test_no_batch_is_kept(log: Path) -> None:
    """Only the current and the previous batch are alive, whatever the log's length; the oracle keeps indices."""
    ids: list[weakref.ref[NDArray[np.int64]]] = []
    alive: list[int] = []

    def watch(batches: Iterable[Batch], label: str, total: int | None) -> Iterator[Batch]:
        for batch in batches:
            ids.append(weakref.ref(batch.values))
            alive.append(sum(ref() is not None for ref in ids))
            yield batch

    flags = ("--data.batch_size", "20", "--lookahead", "4", "--cache_rows", "400", "--policy", ALL)
    replay(sweep_of(log, *flags), watch)
    assert len(alive) == 3 * 30  # the counting pass and two oracle policies; baselines read the row batches
    assert max(alive) == 2


def test_a_log_without_ids_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "bare.tsv").write_text(("1" + 39 * "\t" + "\n") * 5)
    flags = ("--data.path", str(tmp_path / "bare.tsv"), "--data.format", "criteo-tsv", "--lookahead", "1")
    found = replay(parse_sweep([*flags, "--data.batch_size", "2", "--policy", ALL]), plain)
    assert [(r.error, r.rows_unique, r.rows_fetched, r.peak_rows, r.hit_rate) for r in found.records] == [
        (None, 0, 0, 0, 0.0)
    ] * 6


def test_caches_that_are_tried_differ(log: Path) -> None:
    flags = ("--data.batch_size", "1", "--world_size", "64", "--lookahead", "1", "--policy", "lru")
    found = replay(sweep_of(log, *flags), plain)
    sizes = [record.cache_rows for record in found.records]
    assert len(sizes) == len(set(sizes))
    assert found.rows // 50 // 64 < 1  # where two shares would be one


def test_a_cache_larger_than_the_log_takes_no_more_memory(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = []

    def note(*args: object, num_slots: int, **kwargs: object) -> object:
        slots.append(num_slots)
        return run_baseline(*args, num_slots=num_slots, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("data.replay.passes.run_baseline", note)
    found = replay(sweep_of(log, "--lookahead", "1", "--cache_rows", str(10**30), "--policy", "lru"), plain)
    assert slots == [found.rows]
    assert found.records[0].rows_fetched == 0


def test_a_changed_log_is_reported_and_earlier_results_stay(log: Path) -> None:
    def watch(batches: Iterable[Batch], label: str, total: int | None) -> Iterator[Batch]:
        """From the second pass on, the log has one batch less."""
        batches = iter(batches)
        if passes:
            next(batches)
        passes.append(label)
        yield from batches

    passes: list[str] = []
    flags = ("--data.batch_size", "60,50", "--lookahead", "4", "--cache_rows", "450", "--policy", "drop-unused,lru")
    first, second, *rest = replay(sweep_of(log, *flags), watch).records
    assert str(first.error).startswith(f"{log}: the log changed while it was replayed: 600 examples with ")
    assert ", then 540 with " in str(first.error)
    assert (second.error, second.batches) == (None, 10)
    assert [(record.batch_size, record.policy) for record in rest] == [(50, "drop-unused"), (50, "lru")]
    assert all(", then 550 with " in str(record.error) for record in rest)


def test_no_room_for_a_baseline_costs_the_others_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(row_batches: RowBatchFile, rows: NDArray[np.int32]) -> None:
        if "next-uses" in str(row_batches._paths[0]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(row_batches, rows)

    whole = RowBatchFile.append
    monkeypatch.setattr(RowBatchFile, "append", append)
    flags = ("--lookahead", "1", "--policy", "drop-unused,offline-belady,lru", "--cache_rows", "900")
    errors = [record.error for record in replay(sweep_of(log, *flags), plain).records]
    assert (errors[0], errors[2]) == (None, None)
    assert "No space left on device; set TMPDIR" in str(errors[1])


def test_no_room_for_the_rows_of_the_log_is_one_line(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(row_batches: RowBatchFile, rows: NDArray[np.int32]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RowBatchFile, "append", append)
    with pytest.raises(JobError, match=r"cannot keep the rows of the log in .*: No space left on device; set TMPDIR"):
        replay(sweep_of(log, "--policy", "lru"), plain)


def test_no_data_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    sweep = parse_sweep(["--data.path", str(tmp_path / "empty.tsv"), "--data.format", "criteo-tsv"])
    with pytest.raises(InputError, match="empty"):
        replay(sweep, plain)


def test_a_stream_is_not_replayed(log: Path) -> None:
    sweep = parse_sweep(
        ["--data.path", str(log), "--data.format", "criteo-tsv", "--data.follow", "age", "--data.eval_fraction", "0"]
    )
    with pytest.raises(InputError, match=r"replay reads a whole log, several times: .* is read as a stream"):
        replay(sweep, plain)


def number(count: int | None) -> int:
    assert count is not None
    return count


def good(found: Replay) -> list[ReplayRecord]:
    return [record for record in found.records if record.error is None]
