"""Times of examples: read from each format where they are wanted, and with their examples through all that follows."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.clock import TIMES, Clock, clock_of, outside_times
from data.columnar_writer import write_columnar
from data.csv import CsvSource
from data.formats import open_source
from data.kafka_topic import KafkaTopic
from data.loader import LookaheadLoader
from data.narrowed import narrowed
from data.parquet import ParquetSource
from data.source import Block, Source
from data.testing import assert_same_batches, check_source, read_all
from tests.data.files import avazu_csv, avazu_row, criteo_lines, save_to_disk, write_examples

ROWS = 40
#: 2024-02-28 23:00 UTC: the hours after it cross a leap day.
START_S = 1_709_161_200
SCHEMA = 'label = "y"\nsparse = ["user"]\ntime = "when"\n'


def time_of(user: int) -> int:
    """The time of the example of a user: whole hours, in another order than the users."""
    return START_S + 3600 * (user * 7 % ROWS)


def users() -> list[int]:
    return list(range(1, ROWS + 1))


def table(times: Any) -> pa.Table:
    return pa.table({"y": [1.0] * ROWS, "user": users(), "when": times})


def _avazu(folder: Path) -> dict[str, Any]:
    whens = {user: datetime.datetime.fromtimestamp(time_of(user), datetime.UTC) for user in users()}
    rows = [avazu_row(C14=str(user), hour=f"{when:%y%m%d%H}") for user, when in whens.items()]
    (folder / "log").write_bytes(avazu_csv(rows))
    return {"schema": "", "user": "C14"}


def _movielens(folder: Path, separator: str = "\t") -> dict[str, Any]:
    lines = [separator.join([str(user), "3", "4", str(time_of(user))]) for user in users()]
    header = "userId,movieId,rating,timestamp\n" if separator == "," else ""
    (folder / "log").write_text(header + "".join(f"{line}\n" for line in lines))
    return {"schema": ""}


def _csv(folder: Path) -> dict[str, Any]:
    lines = [f"{time_of(user) * 1000 + 999},{user},1" for user in users()]
    (folder / "log").write_text("when,user,y\n" + "".join(f"{line}\n" for line in lines))
    return {"schema": SCHEMA + 'time_unit = "ms"\n'}


def _parquet(folder: Path) -> dict[str, Any]:
    pq.write_table(table(pa.array([time_of(user) for user in users()])), folder / "log", row_group_size=11)
    return {"schema": SCHEMA}


def _huggingface(folder: Path) -> dict[str, Any]:
    save_to_disk(table(pa.array([time_of(user) for user in users()], pa.timestamp("s"))), folder / "log")
    return {"schema": SCHEMA}


def _tfrecord(folder: Path) -> dict[str, Any]:
    write_examples(folder / "log", [{"y": 1, "user": user, "when": time_of(user)} for user in users()])
    return {"schema": SCHEMA}


#: Name of a log -> its format, and its writer.
LOGS: dict[str, tuple[Any, Callable[[Path], dict[str, Any]]]] = {
    "avazu-csv": ("avazu-csv", _avazu),
    "u.data": ("movielens", _movielens),
    "ratings.dat": ("movielens", lambda folder: _movielens(folder, "::")),
    "ratings.csv": ("movielens", lambda folder: _movielens(folder, ",")),
    "csv": ("csv", _csv),
    "parquet": ("parquet", _parquet),
    "huggingface": ("huggingface", _huggingface),
    "tfrecord": ("tfrecord", _tfrecord),
}


def config_of(folder: Path, name: str) -> tuple[DataConfig, str]:
    """A written log, and the feature of its users."""
    form, write = LOGS[name]
    given = write(folder)
    schema = folder / "s.toml"
    schema.write_text(given["schema"])
    return DataConfig(format=form, path=str(folder / "log"), schema=str(schema)), given.get("user", "user")


def pairs(source: Source, batches: list[Batch], feature: str = "user") -> list[tuple[int, int]]:
    """User and time of all examples."""
    number = [item.name for item in source.schema.features].index(feature)
    found = []
    for batch in batches:
        start = int(batch.feature_offsets()[number])
        assert batch.times_s is not None
        assert batch.times_s.dtype == np.int64
        found += list(
            zip(batch.values[start : start + batch.num_examples].tolist(), batch.times_s.tolist(), strict=True)
        )
    return found


EXPECTED = [(user, time_of(user)) for user in users()]


@pytest.mark.parametrize("name", LOGS)
def test_each_format_gives_the_times_of_its_examples(tmp_path: Path, name: str) -> None:
    config, feature = config_of(tmp_path, name)
    plain, source = open_source(config), open_source(config, wants_times=True)
    assert clock_of(plain) is None
    assert plain.layout == source.layout, "a position saved without times is valid with them"
    timed, untimed = (read_all(LookaheadLoader(each, batch_size=7)) for each in (source, plain))
    assert pairs(source, timed, feature) == EXPECTED
    assert_same_batches([dataclasses.replace(batch, times_s=None) for batch in timed], untimed)
    shuffled = read_all(LookaheadLoader(source, batch_size=7, shuffle=True, seed=2))
    assert sorted(pairs(source, shuffled, feature)) == EXPECTED
    for suffix in (".arrow", ".parquet"):
        out = tmp_path / f"out{suffix}"
        write_columnar(source, str(out))
        converted = ParquetSource.at(str(out)).with_times()
        assert_same_batches(read_all(LookaheadLoader(converted, batch_size=7)), timed)
        assert clock_of(ParquetSource.at(str(out))) is None, "a converted file's times are read where they are wanted"


@pytest.mark.parametrize("name", ["u.data", "csv", "parquet"])
def test_times_keep_a_readers_promises(tmp_path: Path, name: str) -> None:
    config, _ = config_of(tmp_path, name)
    source = open_source(config, wants_times=True)
    check_source(dataclasses.replace(source, **({"block_rows": 9} if name == "parquet" else {"block_bytes": 99})))  # type: ignore[type-var]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    block_rows=st.integers(1, 12),
    batch_size=st.integers(1, 15),
    shuffle=st.booleans(),
    shuffle_buffer=st.sampled_from([0, 20]),
    limit=st.integers(0, ROWS + 2),
    epochs=st.integers(1, 2),
    bad=st.sets(st.integers(0, ROWS - 1), max_size=5),
    dense=st.booleans(),
)
def test_times_follow_their_examples(
    tmp_path: Path,
    block_rows: int,
    batch_size: int,
    shuffle: bool,
    shuffle_buffer: int,
    limit: int,
    epochs: int,
    bad: set[int],
    dense: bool,
) -> None:
    """Through blocks, bad rows, orders, limits, and a source with some of its features."""
    (tmp_path / "s.toml").write_text('label = "y"\nsparse = ["user", "same"]\ntime = "when"\n')
    times = [None if row in bad else time_of(user) for row, user in enumerate(users())]
    pq.write_table(table(pa.array(times, pa.int64())).append_column("same", [users()]), tmp_path / "a.parquet")
    source = ParquetSource.at(
        str(tmp_path / "a.parquet"), schema_path=str(tmp_path / "s.toml"), bad_rows="skip", block_rows=block_rows
    ).with_times()
    served = narrowed(source, (0,), dense=dense)
    good = [EXPECTED[row] for row in range(limit or ROWS) if row < ROWS and row not in bad]
    loader = LookaheadLoader(
        served,
        batch_size=batch_size,
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer if shuffle else 0,
        limit=limit,
        epochs=epochs,
    )
    if good:
        found = pairs(served, read_all(loader))
        assert sorted(found) == sorted(good * epochs) if shuffle else found == good * epochs


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_carry_their_unit(tmp_path: Path, unit: str) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    moments = [datetime.datetime.fromtimestamp(time_of(user), datetime.UTC) for user in users()]
    zone = pa.timestamp(unit, tz="America/New_York")  # the same moments
    source = _timed_parquet(tmp_path, pa.array(moments, pa.timestamp(unit, tz="UTC")).cast(zone))
    assert pairs(source, read_all(LookaheadLoader(source, batch_size=7))) == EXPECTED


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_a_date_is_its_first_second(tmp_path: Path, kind: pa.DataType) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    source = _timed_parquet(tmp_path, pa.array([datetime.date(2024, 2, 29)] * ROWS, kind))
    (batch,) = read_all(LookaheadLoader(source, batch_size=ROWS))
    assert batch.times_s is not None
    assert set(batch.times_s.tolist()) == {START_S + 3600}


@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 1000), ("us", 1_000_000)])
def test_integers_have_the_unit_of_the_schema(tmp_path: Path, unit: str, factor: int) -> None:
    (tmp_path / "s.toml").write_text(f'{SCHEMA}time_unit = "{unit}"\n')
    source = _timed_parquet(tmp_path, pa.array([time_of(user) * factor for user in users()]))
    assert pairs(source, read_all(LookaheadLoader(source, batch_size=7))) == EXPECTED


def _timed_parquet(folder: Path, times: Any) -> ParquetSource:
    pq.write_table(table(times), folder / "a.parquet")
    return ParquetSource.at(str(folder / "a.parquet"), schema_path=str(folder / "s.toml")).with_times()


BAD_COLUMNS = [
    (pa.array([1.5] * ROWS), "", "column 'when': expected times as integers, timestamps or dates, got double"),
    (pa.array(["x"] * ROWS), "", "column 'when': expected times as integers, timestamps or dates, got string"),
    (
        pa.array([0] * ROWS, pa.timestamp("ms")),
        'time_unit = "ms"\n',
        "column 'when': time_unit is of integers, the column has its own, timestamp[ms]",
    ),
]


@pytest.mark.parametrize(("times", "keys", "message"), BAD_COLUMNS)
def test_a_column_of_another_type_is_refused(tmp_path: Path, times: Any, keys: str, message: str) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA + keys)
    with pytest.raises(InputError, match=re.escape(message)):
        _timed_parquet(tmp_path, times)


#: Log, text to replace, its replacement, and what the message says after the file.
BAD_TIMES = [
    ("avazu-csv", b",24022823,", b",,", ":41: expected an hour as YYMMDDHH in hour (column 3), got ''"),
    (
        "avazu-csv",
        b",24022823,",
        b",69022823,",
        ":41: expected a time of the years 1970 to 9999, got -26442000 s",
    ),
    ("u.data", b"\t1709161200\n", b"\tx\n", ":40: expected a time in whole seconds since 1970 in timestamp (column 4)"),
    (
        "ratings.dat",
        b"::1709161200\n",
        b"::\n",
        ":40: expected a time in whole seconds since 1970 in timestamp (column",
    ),
    ("ratings.csv", b",1709161200\n", b",-1\n", ":41: expected a time of the years 1970 to 9999, got -1 s since 1970"),
    ("csv", b"1709161200999,", b",", ":41: expected a time in column 'when', got null"),
    ("csv", b"1709161200999,", b"today,", ":41: expected an integer in column 'when', got 'today'"),
    ("csv", b"1709161200999,", b"-1,", ":41: expected a time of the years 1970 to 9999, got -1 s since 1970"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), BAD_TIMES)
def test_a_value_that_is_no_time_is_named_or_skipped(
    tmp_path: Path, name: str, old: bytes, new: bytes, message: str
) -> None:
    config, feature = config_of(tmp_path, name)
    path = Path(config.path)
    text = path.read_bytes()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new))
    with pytest.raises(InputError, match=re.escape(f"{path}{message}")):
        read_all(LookaheadLoader(open_source(config, wants_times=True), batch_size=7))
    skipping = open_source(dataclasses.replace(config, bad_rows="skip"), wants_times=True)
    assert pairs(skipping, read_all(LookaheadLoader(skipping, batch_size=7)), feature) == EXPECTED[:-1]
    if not name.startswith("avazu"):  # its hour is two features too
        read_all(LookaheadLoader(open_source(config), batch_size=7))


def test_a_null_in_a_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    source = _timed_parquet(tmp_path, pa.array([None if user == 3 else time_of(user) for user in users()]))
    with pytest.raises(InputError, match=r"row 2 \(from 0\): expected a time in column 'when', got null"):
        read_all(LookaheadLoader(source, batch_size=7))


def test_milliseconds_declared_as_seconds_are_refused_at_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    source = _timed_parquet(tmp_path, pa.array([time_of(user) * 1000 for user in users()]))
    with pytest.raises(InputError, match=r"row 0 \(from 0\): expected a time of the years 1970 to 9999, got 17"):
        read_all(LookaheadLoader(source, batch_size=7))


def test_data_without_a_clock_is_refused_where_one_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(criteo_lines(3))
    said = (
        r"data.expire_unit days needs a clock: expected a column of times in the schema \(key time\), or format "
        r"avazu-csv or movielens, got none for format "
    )
    with pytest.raises(InputError, match=f"{said}criteo-tsv"):
        open_source(DataConfig(format="criteo-tsv", path=str(tmp_path / "a.tsv")), wants_times=True)
    (tmp_path / "s.toml").write_text('label = "y"\nsparse = ["user"]\n')
    (tmp_path / "a.csv").write_text("y,user\n1,2\n")
    config = DataConfig(format="csv", path=str(tmp_path / "a.csv"), schema=str(tmp_path / "s.toml"))
    with pytest.raises(InputError, match=f"{said}csv"):
        open_source(config, wants_times=True)
    with pytest.raises(InputError, match=f"{said}synthetic"):
        open_source(DataConfig(format="synthetic"), wants_times=True)
    (tmp_path / "s.toml").write_text(SCHEMA)
    open_source(config)  # the column is not looked for
    with pytest.raises(InputError, match=r"a.csv:1: expected a column 'when', got none in 'y,user'"):
        open_source(config, wants_times=True)
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating\n1,2,3\n")
    with pytest.raises(InputError, match=r"ratings.csv:1: expected a header with a column 'timestamp', got none"):
        open_source(DataConfig(format="movielens", path=str(path)), wants_times=True)


def test_synthetic_times_are_even_and_do_not_change_the_rest(tmp_path: Path) -> None:
    schema = tmp_path / "s.toml"
    schema.write_text('time = "t"\n[synthetic]\nrows = 20000\nrows_per_day = 7000\ntables = 2\n')
    config = DataConfig(format="synthetic", schema=str(schema))
    source, plain = open_source(config, wants_times=True), open_source(config)
    (batch,) = read_all(LookaheadLoader(source, batch_size=20_000))
    (alone,) = read_all(LookaheadLoader(plain, batch_size=20_000))
    assert_same_batches([dataclasses.replace(batch, times_s=None)], [alone])
    assert batch.times_s is not None
    start_s = int(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp())
    assert batch.times_s.tolist() == [start_s + row * 86_400 // 7000 for row in range(20_000)]


def test_a_written_column_of_times_has_a_name_of_its_own(tmp_path: Path) -> None:
    """A column of times can be a feature too, as an hour that is also an id."""
    (tmp_path / "s.toml").write_text('label = "y"\ndense = ["when"]\nsparse = ["user"]\ntime = "when"\n')
    (tmp_path / "a.csv").write_text("y,user,when\n1,2,60\n0,3,61\n")
    source = CsvSource.at(str(tmp_path / "a.csv"), schema_path=str(tmp_path / "s.toml")).with_times()
    (batch,) = read_all(LookaheadLoader(source, batch_size=4))
    assert batch.dense.tolist() == [[60], [61]]
    write_columnar(source, str(tmp_path / "a.parquet"))
    assert pq.read_schema(tmp_path / "a.parquet").names == ["y", "when", "user", "when.time"]
    back = ParquetSource.at(str(tmp_path / "a.parquet")).with_times()
    assert_same_batches(read_all(LookaheadLoader(back, batch_size=4)), [batch])


def test_streams_have_the_times_of_their_examples(tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    (tmp_path / "s.toml").write_text(SCHEMA)
    for day in range(2):
        (folder / f"{day}.csv").write_text(f"y,user,when\n1,{day},{day * 86_400}\n")
        (folder / f"_DONE.{day}.csv").touch()
    (folder / "_DONE").touch()
    config = DataConfig(
        format="csv",
        path=str(folder),
        schema=str(tmp_path / "s.toml"),
        follow="marker",
        stream_wait_s=0.01,
        stream_idle_s=0.01,
    )
    source = open_source(config, wants_times=True)
    loader = LookaheadLoader(source, batch_size=4)
    assert pairs(source, read_all(loader)) == [(0, 0), (1, 86_400)]
    lines = dataclasses.replace(config, path="kafka://host:1/clicks")
    (tmp_path / "s.toml").write_text(SCHEMA + '[csv]\ncolumns = ["y", "user", "when"]\n')
    parser = CsvSource.of_lines(schema_path=str(tmp_path / "s.toml"))
    topic = KafkaTopic(name=lines.path, config=lines, parser=parser, settings=(), num_partitions=1)
    block = Block(file="partition 0", start=0, stop=1, payload=b"1,5,86400\n")
    assert topic.read(block).times_s is None
    times_s = topic.with_times().read(block).times_s
    assert times_s is not None
    assert times_s.tolist() == [86_400]


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2) | st.integers(TIMES.stop - 2, TIMES.stop + 2)))
def test_times_lie_in_the_years_1970_to_9999(numbers: list[int]) -> None:
    found = outside_times(np.array(numbers, np.int64)).tolist()
    assert found == [place for place, number in enumerate(numbers) if number not in TIMES]
    assert datetime.datetime.fromtimestamp(TIMES[-1], datetime.UTC).isoformat() == "9999-12-31T23:59:59+00:00"


def test_a_clock_has_a_column_and_a_known_unit() -> None:
    assert (Clock(name="t").parts, Clock(name="t", unit="us").parts) == (1, 1_000_000)
    with pytest.raises(InputError, match="time_unit must be one of s, ms, us, got 'h'"):
        Clock(name="t", unit="h")
    with pytest.raises(InputError, match="time must be the name of a column, got an empty one"):
        Clock(name="")
