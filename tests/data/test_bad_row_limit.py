"""Malformed rows without end stop a job that skips them, in bounded memory."""

from __future__ import annotations

import gzip
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data import bad_row_limit
from data.avazu import AvazuSource
from data.bad_row_limit import MAX_BAD_ROWS, BadRowLimit
from data.columnar_writer import write_columnar
from data.criteo import CriteoSource
from data.csv import CsvSource
from data.loader import LookaheadLoader
from data.movielens import MovieLensSource
from data.source import Block, Source
from data.text_files import text_blocks, text_segments
from tests.data.files import avazu_csv, avazu_rows, criteo_line

SCHEMA = 'label = "click"\ndense = ["price"]\nsparse = ["user"]\n'


class Numbered(CriteoSource):
    """A source whose places are row numbers."""

    __slots__ = ()

    def locate(self, block: Block, row: int) -> str:
        return f"row {block.start + row}"


def refused_at(rows: list[bool], sizes: list[int], most: int) -> int | None:
    """The row at which `BadRowLimit` refuses good (True) and malformed rows, in blocks of these sizes."""
    limit, first = BadRowLimit(Numbered(files=()), most), 0
    for size in sizes:
        part = np.array(rows[first : first + size], np.bool_)
        block = Block(file="", start=first, stop=first + size)
        try:
            limit.check(block, len(part), np.flatnonzero(~part))
        except InputError as error:
            return int(re.findall(r"^row (\d+): ", str(error))[0])
        first += size
    return None


@given(rows=st.lists(st.booleans(), max_size=60), cuts=st.lists(st.integers(0, 20), max_size=8), most=st.integers(1, 9))
def test_the_first_row_beyond_the_limit_is_named_wherever_blocks_begin(
    rows: list[bool], cuts: list[int], most: int
) -> None:
    balance, expected = 0, None
    for number, good in enumerate(rows):
        balance = max(0, balance - 3) if good else balance + 1
        if balance > most and expected is None:
            expected = number
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bad_row_limit, "GOOD_ROW", 3)
        assert refused_at(rows, [*cuts, len(rows)], most) == expected


def test_a_good_row_now_and_then_does_not_help() -> None:
    rows = ([True] + [False] * 1000) * 20
    assert refused_at(rows, [1001] * 20, 10_000) == 11 * 1001 + 101
    assert refused_at(([True] + [False] * 100) * 200, [len(rows)], 10_000) is None


def criteo(path: Path, text: bytes) -> CriteoSource:
    path.write_bytes(gzip.compress(criteo_line() + b"\n" + text, 1))
    return CriteoSource.at(str(path), bad_rows="skip")


def avazu(path: Path, text: bytes) -> AvazuSource:
    path.write_bytes(gzip.compress(avazu_csv(avazu_rows(1)) + text, 1))
    return AvazuSource.at(str(path), bad_rows="skip")


def movielens(path: Path, text: bytes) -> MovieLensSource:
    path.write_bytes(gzip.compress(b"1\t2\t3\t4\n" + text, 1))
    return MovieLensSource.at(str(path), bad_rows="skip")


def csv(path: Path, text: bytes) -> CsvSource:
    path.write_bytes(gzip.compress(b"click,price,user\n1,2,3\n" + text, 1))
    path.with_name("schema.toml").write_text(SCHEMA)
    return CsvSource.at(str(path), schema_path=str(path.with_name("schema.toml")), bad_rows="skip")


READERS = (criteo, avazu, movielens, csv)


def read(source: Source, **options: Any) -> int:
    with LookaheadLoader(source, batch_size=4, **options) as loader:
        return sum(1 for _ in loader)


@pytest.mark.parametrize("line", [b"\n", b"x\n"], ids=["blank", "short"])
@pytest.mark.parametrize("make", READERS)
def test_a_stream_of_malformed_lines_ends_the_job(
    tmp_path: Path, make: Callable[[Path, bytes], Source], line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_row_limit.BadRowLimit.__init__, "__defaults__", (1000,))
    source = make(tmp_path / "bomb.gz", line * 2000)
    header = int(make in (avazu, csv))
    said = (
        f"{tmp_path}/bomb.gz:{1002 + header}: expected at least one good row for 100 malformed ones, "
        "got 1001 malformed ones beyond that (data.bad_rows = skip)"
    )
    for options in ({}, {"shuffle": True}, {"shuffle": True, "shuffle_buffer": 10}, {"eval_fraction": 0.1}):
        with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
            read(source, **options)
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        write_columnar(source, str(tmp_path / "out.arrow"))
    assert read(make(tmp_path / "short.gz", line * 1000)) == 1


@pytest.mark.parametrize("make", [criteo, movielens])
def test_millions_of_empty_lines_are_passed_over_within_seconds(
    tmp_path: Path, make: Callable[[Path, bytes], Source]
) -> None:
    """48 million of them are 47 KB of gzip."""
    source = make(tmp_path / "bomb.gz", b"\n" * (48 << 20))
    with pytest.raises(InputError, match=rf"bomb\.gz:{MAX_BAD_ROWS + 2}: expected at least one good row"):
        read(source)


def test_empty_lines_take_the_memory_of_a_block(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(criteo_line() + b"\n" * (4 << 20), 1))
    source = CriteoSource(files=(str(path),), bad_rows="skip", block_bytes=32 << 10)
    read(source)
    tracemalloc.start()
    try:
        assert read(source) == 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20, "the text, not a block"


def test_a_long_line_leaves_the_blocks_after_it_as_small_as_before(tmp_path: Path) -> None:
    path = tmp_path / "long.gz"
    path.write_bytes(gzip.compress(b"9" * 1_000_000 + b"\n" * 1_000_000, 1))
    [segment] = text_segments(str(path), 1000)
    sizes = [len(block.payload or b"") for block in text_blocks(segment, 1000)]
    assert max(sizes[1:]) <= 2000
