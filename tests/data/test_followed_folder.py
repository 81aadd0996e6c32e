"""A folder that grows is read like one that was all there, whatever the times of arrival and wherever a job resumes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.followed_folder import FollowedFolder
from data.formats import open_source
from data.loader import LookaheadLoader, open_loader
from data.testing import assert_same_batches, check_resume, read_all
from tests.data.files import criteo_lines

SCHEMA = """
label = "click"
dense = ["price"]
sparse = ["item"]
"""
HEADER = b"click,price,item\n"


def config(folder: Path, **changes: Any) -> DataConfig:
    given: dict[str, Any] = {
        "path": str(folder),
        "format": "criteo-tsv",
        "batch_size": 8,
        "eval_fraction": 0.0,
        "workers": 0,
        "follow": "marker",
        "stream_wait_s": 0.01,
    }
    return DataConfig(**{**given, **changes})


def put(folder: Path, name: str, content: bytes) -> None:
    """A file, then its marker."""
    (folder / name).write_bytes(content)
    (folder / f"_DONE.{name}").touch()


def plain(config: DataConfig) -> list[Batch]:
    """The batches of the folder as it is, read without following it."""
    return read_all(open_loader(dataclasses.replace(config, follow="off", until=""), seed=0))


@pytest.fixture
def days(tmp_path: Path) -> Path:
    folder = tmp_path / "days"
    folder.mkdir()
    for number, rows in enumerate((20, 5, 16, 1, 30)):
        put(folder, f"day_{number}", criteo_lines(rows, seed=number))
    return folder


def test_every_position_resumes(days: Path) -> None:
    (days / "_END").touch()
    batches = check_resume(lambda state: open_loader(config(days), seed=0, state=state))
    assert_same_batches(batches, plain(config(days)))
    assert [batch.num_examples for batch in batches] == [8] * 9


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    pauses=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    resumes=st.integers(0, 4),
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interleaving_of_arrivals_and_reads_gives_the_same_batches(
    sizes: list[int], pauses: list[int], resumes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files come after any numbers of batches have been taken; the loader is closed and resumed at some of them."""
    folder = tmp_path_factory.mktemp("days")
    job = config(folder, batch_size=4)
    put(folder, "day_0", criteo_lines(3, seed=99))
    got: list[Batch] = []
    state: dict[str, Any] | None = None
    num_rows, wanted = 3, iter(zip(sizes, pauses, strict=False))
    is_over = False
    while not is_over:
        with open_loader(job, seed=0, state=state) as loader:
            for number, (rows, pause) in enumerate(itertools.islice(wanted, resumes + 1), start=num_rows):
                put(folder, f"day_{number}", criteo_lines(rows, seed=number))
                num_rows += rows
                for batch in itertools.islice(loader, min(pause, num_rows // 4 - len(got))):
                    got.append(batch)
            state = json.loads(json.dumps(loader.state()))
            if num_rows == 3 + sum(sizes):
                (folder / "_END").touch()
                got += loader
                is_over = True
    assert_same_batches(got, plain(job))


def test_rows_that_do_not_fill_a_batch_wait_for_more(days: Path) -> None:
    with open_loader(config(days, batch_size=50), seed=0) as loader:
        first = next(loader)
        assert not loader.wait(0.05)  # 22 rows are left
        put(days, "day_5", criteo_lines(28, seed=5))
        second = next(loader)
        (days / "_END").touch()
        assert next(loader, None) is None
    assert_same_batches([first, second], plain(config(days, batch_size=50)))


def test_a_limit_and_the_idle_time_end_a_stream(days: Path) -> None:
    limited = config(days, limit=21)
    assert_same_batches(read_all(open_loader(limited, seed=0)), plain(limited))
    idle = config(days, stream_idle_s=0.05)
    assert_same_batches(read_all(open_loader(idle, seed=0)), plain(idle))


def test_a_stream_that_ended_goes_on_with_later_files(days: Path) -> None:
    """Only the end made a smaller batch."""
    job = config(days, batch_size=50, stream_idle_s=0.05)
    with open_loader(job, seed=0) as loader:
        assert [batch.num_examples for batch in loader] == [50, 22]
        state = loader.state()
    put(days, "day_5", criteo_lines(60, seed=5))
    with open_loader(job, seed=0, state=state) as loader:
        assert [batch.num_examples for batch in loader] == [50, 10]
        state = loader.state()
    put(days, "day_6", criteo_lines(60, seed=5))
    assert [batch.num_examples for batch in read_all(open_loader(job, seed=0, state=state))] == [50, 10]


def test_a_time_ends_a_stream(days: Path) -> None:
    for number, seconds in enumerate((1000, 1000, 1001, 1002, 1002)):
        os.utime(days / f"_DONE.day_{number}", (seconds, seconds))
    job = config(days, until="1970-01-01T00:16:41")
    batches = read_all(open_loader(job, seed=0))
    assert sum(batch.num_examples for batch in batches) == 41
    by_age = config(days, follow="age", follow_age_s=0.0, until="2000-01-01")
    with pytest.raises(
        InputError, match="expected at least one complete file to begin with, unchanged for 0 s, got none"
    ):
        open_source(by_age)


def test_a_time_ends_a_stream_at_the_first_later_file(days: Path) -> None:
    for number, seconds in enumerate((1000, 1000, 1001, 1002, 1000)):
        os.utime(days / f"day_{number}", (seconds, seconds))
    job = config(days, follow="age", follow_age_s=0.0, until="1970-01-01T00:16:41")
    batches = check_resume(lambda state: open_loader(job, seed=0, state=state))
    assert sum(batch.num_examples for batch in batches) == 41
    with open_loader(job, seed=0) as loader:
        list(loader)
        state = json.loads(json.dumps(loader.state()))
    rest = read_all(open_loader(config(days, stream_idle_s=0.05), seed=0, state=state))
    assert sum(batch.num_examples for batch in rest) == 31


@pytest.mark.parametrize("workers", [0, 1])
def test_other_formats(tmp_path: Path, workers: int) -> None:
    folder, schema = tmp_path / "days", tmp_path / "schema.toml"
    folder.mkdir()
    schema.write_text(SCHEMA)
    put(folder, "a.csv", HEADER + b"1,2,3\n0,4,5\n")
    job = config(folder, format="csv", schema=str(schema), batch_size=3, workers=workers)
    with open_loader(job, seed=0) as loader:
        put(folder, "b.csv", HEADER + b"1,6,7\n")
        first = next(loader)
        put(folder, "c.csv", b"item,click,price\n9,1,8\n")  # other order
        (folder / "_END").touch()
        rest = list(loader)
    assert_same_batches([first, *rest], plain(job))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "late": (lambda days: (days / "day_01").write_bytes(b""), r"day_01: appeared after day_4 was read"),
    "empty": (lambda days: put(days, "day_5", b""), r"day_5: the file is empty, expected lines of text"),
    "columns": (lambda days: put(days, "day_5", b"1\t2\n"), r"day_5:1: expected 40 tab-separated columns, got 2"),
    "gone": (lambda days: days.rename(days.with_name("gone")), r"days: expected a folder that grows: No such file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_comes_is_refused(name: str, days: Path) -> None:
    change, message = REFUSED[name]
    with open_loader(config(days), seed=0) as loader:
        assert [next(loader).index for _ in range(9)] == list(range(9))
        change(days)
        with pytest.raises(InputError, match=message):
            next(loader)


def state_after(days: Path, batches: int) -> dict[str, Any]:
    with open_loader(config(days), seed=0) as loader:
        for _ in range(batches):
            next(loader)
        return json.loads(json.dumps(loader.state()))


def test_files_before_the_position_can_be_removed(days: Path) -> None:
    state = state_after(days, 4)
    place = {"file": "day_2", "segment": 0, "bytes": (days / "day_2").stat().st_size, "files": 2}
    assert state["place"] == {**place, **{key: state["place"][key] for key in ("names", "content")}}
    (days / "_END").touch()
    whole = plain(config(days))
    for number in range(2):
        (days / f"day_{number}").unlink()
    assert_same_batches(read_all(open_loader(config(days), seed=0, state=state)), whole[4:])


MOVED: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (
        lambda days: (days / "day_2").unlink(),
        "day_2: the position in the stream is in this file, expected it, ",
    ),
    "replaced": (
        lambda days: (days / "day_2").write_bytes((days / "day_2").read_bytes().swapcase()),
        r"day_2: expected the content of the job so far, got other bytes in the first or last 64 KiB",
    ),
    "longer": (lambda days: (days / "day_2").write_bytes(b"x"), r"day_2: expected the \d+ bytes of the job so far"),
    "more": (lambda days: put(days, "day_1b", b""), "expected the 2 files that the job has read before day_2, got 3,"),
    "others": (
        lambda days: (days / "day_1").rename(days / "day_1b"),
        "expected the 2 files that the job has read before day_2, got 2, not all",
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_position_of_other_files_is_refused(name: str, days: Path) -> None:
    state = state_after(days, 4)
    change, message = MOVED[name]
    change(days)
    with pytest.raises(InputError, match=message), open_loader(config(days), seed=0, state=state):
        pass


@pytest.mark.parametrize("changed", ["first", "last", "between", "touched", "unknown"])
def test_the_ends_of_the_positions_file_are_compared(changed: str, tmp_path: Path) -> None:
    """And not what is between them, nor times; nor anything of a position that has no hash."""
    folder = tmp_path / "days"
    folder.mkdir()
    put(folder, "day_0", criteo_lines(2000))
    state, path = state_after(folder, 2), folder / "day_0"
    text = bytearray(path.read_bytes())
    assert len(text) > 3 << 16
    if changed == "touched":
        os.utime(path, (1, 1))
    else:
        place = {"first": 0, "last": len(text) - 1, "between": len(text) // 2, "unknown": 0}[changed]
        text[place] ^= 1
        path.write_bytes(text)
    if changed == "unknown":
        del state["place"]["content"]
    refused = changed in ("first", "last")
    with pytest.raises(InputError, match="got other bytes") if refused else nullcontext():
        with open_loader(config(folder), seed=0, state=state):
            pass


@pytest.mark.parametrize(
    "place",
    [7, {}, {"file": "day_0"}, {"file": "../x", "segment": 0, "bytes": 0, "files": 0, "names": ""},
     {"file": "day_0", "segment": True, "bytes": 0, "files": 0, "names": ""},
     {"file": "day_0", "segment": 0, "bytes": 0, "files": 0, "names": "", "content": 5}],
)  # fmt: skip
def test_a_place_from_a_stranger_is_refused(place: object, days: Path) -> None:
    state = {**state_after(days, 1), "place": place}
    with pytest.raises(InputError, match="loader state: expected "), open_loader(config(days), seed=0, state=state):
        pass


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    put(folder, "a", criteo_lines(3))
    source = open_source(config(folder))
    assert isinstance(source, FollowedFolder)
    other = dataclasses.replace(source, parser=_with_fewer_features(source.parser))
    with pytest.raises(InputError, match="a: expected the columns of the first file, where features"):
        other.source_of("a")


def _with_fewer_features(source: Any) -> Any:
    schema = dataclasses.replace(source.schema, features=source.schema.features[:25])
    return dataclasses.replace(source, schema=schema)


def test_a_stream_is_read_once_and_in_order(days: Path) -> None:
    source = open_source(config(days))
    for options in ({"epochs": 2}, {"shuffle": True}, {"eval_fraction": 0.1}):
        with pytest.raises(InputError, match="a stream is read once, in its order, to its end"):
            LookaheadLoader(source, batch_size=8, **options)  # type: ignore[arg-type]


def test_a_source_of_what_is_there(days: Path) -> None:
    source = open_source(config(days))
    blocks = [block for segment in source.segments() for block in source.blocks(segment)]
    assert [block.file for block in blocks] == [str(days / f"day_{number}") for number in range(5)]
    assert source.locate(blocks[1], 2) == f"{days}/day_1:3"
    assert [source.count_rows(segment) for segment in source.segments()] == [20, 5, 16, 1, 30]
    assert (source.files, source.in_processes, source.multi_hot) == ((), True, frozenset())


def test_entries_that_are_not_read_are_told_once(days: Path, caplog: pytest.LogCaptureFixture) -> None:
    (days / "dt=1").mkdir()
    (days / "gone").symlink_to(days / "nothing")
    (days / "_END").touch()
    batches = read_all(open_loader(config(days), seed=0))
    assert sum(batch.num_examples for batch in batches) == 72
    assert caplog.messages == [f"{days}: left out: dt=1, gone (a stream is of files, without folders and copies)"]


def test_names_need_not_be_utf_8(days: Path) -> None:
    put(days, os.fsdecode(b"day_2\xe9"), criteo_lines(5))
    (days / "_END").touch()
    batches = check_resume(lambda state: open_loader(config(days), seed=0, state=state))
    assert sum(batch.num_examples for batch in batches) == 77
