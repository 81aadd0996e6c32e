from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.files.data_folder import natural_key
from data.source import Block, Segment
from data.text_files import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    count_segment,
    first_line,
    list_files,
    locate_line,
    read_text,
    text_blocks,
    text_segments,
)


def texts(path: Path, block_bytes: int) -> list[bytes]:
    from data.text_files import read_text

    segments = text_segments(str(path), block_bytes)
    return [read_text(block) for segment in segments for block in text_blocks(segment, block_bytes)]


def test_days_come_in_natural_order() -> None:
    names = ["day_10", "day_2.gz", "day_0", "day_1", "day_1b"]
    assert sorted(names, key=natural_key) == ["day_0", "day_1", "day_1b", "day_2.gz", "day_10"]


def test_a_folder_is_its_visible_files(tmp_path: Path) -> None:
    for name in ("day_10", "day_9", ".hidden", "_SUCCESS"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub").mkdir()
    assert list_files(str(tmp_path)) == (str(tmp_path / "day_9"), str(tmp_path / "day_10"))


def test_missing_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        list_files(str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"holds no data file$"):
        list_files(str(tmp_path))
    (tmp_path / "days").mkdir()
    with pytest.raises(InputError, match=r"holds no data file, only days/: name one of them$"):
        list_files(str(tmp_path))
    with pytest.raises(InputError, match=r"data.path is empty"):
        list_files("")


TEXT = b"one\ntwo\n\nfour, the longest line of all\nfive\n"


@pytest.mark.parametrize("block_bytes", [1, 4, 5, 9, 20, 1000])
@pytest.mark.parametrize("name", ["a.tsv", "a.gz"])
def test_blocks_are_whole_lines_and_lose_none(tmp_path: Path, name: str, block_bytes: int) -> None:
    path = tmp_path / name
    for text in (TEXT, TEXT.rstrip(b"\n")):  # a missing final newline is added
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        parts = texts(path, block_bytes)
        assert b"".join(parts) == TEXT
        assert all(part.endswith(b"\n") for part in parts)


@pytest.mark.parametrize("name", ["a.tsv", "a.gz"])
def test_lines_are_counted_and_numbered(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT) if name.endswith("gz") else TEXT)
    segments = text_segments(str(path), 5)
    assert sum(count_segment(segment, None) for segment in segments) == 5
    assert count_segment(segments[0], 1) >= 1
    line = 1
    for segment in segments:
        for block in text_blocks(segment, 5):
            assert locate_line(block, 0) == f"{path}:{line}"
            line += (block.payload or TEXT[block.start : block.stop]).count(b"\n")


def test_counts_follow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    for lines in (3, 4):
        path.write_bytes(gzip.compress(b"x\n" * lines))
        assert count_segment(text_segments(str(path), 100)[0], None) == lines


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\nd\n"))
    assert texts(path, 2) == [b"a\n", b"bc\n", b"d\n"]


def drain(path: Path) -> list[Block]:
    return [block for segment in text_segments(str(path), 50) for block in text_blocks(segment, 50)]


def test_empty_files_are_refused(tmp_path: Path) -> None:
    for name, content in (("a.tsv", b""), ("a.gz", b""), ("b.gz", gzip.compress(b""))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=r"the file is empty"):
            drain(tmp_path / name)


def test_a_cut_gzip_is_refused_after_its_whole_blocks(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    lines = b"".join(b"%d %d\n" % (number, number * 7919 % 1009) for number in range(30_000))
    path.write_bytes(gzip.compress(lines)[:-40_000])
    blocks: list[Block] = []
    with pytest.raises(InputError, match=rf"{path}:\d+: expected the end of the gzip stream, got a file cut short"):
        blocks.extend(text_blocks(Segment(file=str(path), start=0, stop=0), 1000))
    text = b"".join(block.payload or b"" for block in blocks)
    assert text
    assert lines.startswith(text)


@pytest.mark.parametrize("name", ["a.gz", "a.tsv", "a"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_first_bytes_tell_gzip_and_not_the_name(tmp_path: Path, name: str, is_packed: bool) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT) if is_packed else TEXT)
    assert first_line(str(path)) == b"one\n"
    assert b"".join(texts(path, 9)) == TEXT
    segments = text_segments(str(path), 9)
    assert [segment.stop for segment in segments] == [0] if is_packed else len(segments) > 1
    assert sum(count_segment(segment, None) for segment in segments) == 5
    path.write_bytes(TEXT if is_packed else gzip.compress(TEXT))
    assert b"".join(texts(path, 9)) == TEXT, "a file that was replaced"


def test_another_compression_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    for content, name in ((bz2.compress(TEXT), "bzip2"), (lzma.compress(TEXT), "xz")):
        path.write_bytes(content)
        for read in (first_line, lambda file: text_segments(file, 9)):
            with pytest.raises(
                InputError, match=rf"a.tsv: expected text, plain or compressed by gzip, got .* by {name}$"
            ):
                read(str(path))


@pytest.mark.parametrize("block_bytes", [1, 5, 1000])
@pytest.mark.parametrize("name", ["a.tsv", "a.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, name: str, block_bytes: int) -> None:
    """One inside the text stays."""
    path, text = tmp_path / name, TEXT + codecs.BOM_UTF8 + b"six\n"
    marked = codecs.BOM_UTF8 + text
    path.write_bytes(gzip.compress(marked) if name.endswith("gz") else marked)
    assert b"".join(texts(path, block_bytes)) == text
    segments = text_segments(str(path), block_bytes, header=True)
    blocks = [block for segment in segments for block in text_blocks(segment, block_bytes)]
    assert b"".join(map(read_text, blocks)) == text.partition(b"\n")[2]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes("\N{ZERO WIDTH NO-BREAK SPACE}0\t1\n".encode(encoding))
    with pytest.raises(InputError, match=r"a\.tsv: expected UTF-8 text, got UTF-16$"):
        text_segments(str(path), 9)


def test_a_corrupt_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.gz"
    packed = bytearray(gzip.compress(TEXT * 100))
    packed[-6] ^= 0xFF  # the checksum
    for content in (bytes(packed), gzip.compress(TEXT)[:10] + b"\xff" * 20):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.gz:\d+: expected gzip data, got a corrupt stream"):
            drain(path)


@pytest.mark.parametrize("name", ["long", "long.gz"])
def test_a_huge_line_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b"1\n2\n" + bytes(2 * MAX_LINE_BYTES), 1))
    else:
        with path.open("wb") as file:
            file.write(b"1\n2\n")
            file.truncate(1 << 30)  # a sparse file: takes no space
    with pytest.raises(InputError, match=rf"^{path}:3: expected a line of at most 16777216 bytes, got a longer one$"):
        texts(path, BLOCK_BYTES)
    whole = b"1\n" + b"2" * MAX_LINE_BYTES + b"\n3\n"
    path.write_bytes(gzip.compress(whole, 1) if name.endswith(".gz") else whole)
    assert b"".join(texts(path, BLOCK_BYTES)) == whole


@pytest.mark.parametrize("block_bytes", [1, 5, 1000])
@pytest.mark.parametrize("name", ["a.csv", "a.gz"])
def test_the_header_is_skipped_but_counted(tmp_path: Path, name: str, block_bytes: int) -> None:
    path = tmp_path / name
    for header, text in ((b"name\n", TEXT), (b"\n", TEXT), (b"x" * 5000 + b"\r\n", TEXT), (b"name", b"")):
        path.write_bytes(gzip.compress(header + text) if name.endswith("gz") else header + text)
        assert first_line(str(path)).rstrip(b"\n") == header.rstrip(b"\n")
        if not text:
            with pytest.raises(InputError, match="holds nothing but its header"):
                [list(text_blocks(part, block_bytes)) for part in text_segments(str(path), block_bytes, header=True)]
            continue
        segments = text_segments(str(path), block_bytes, header=True)
        blocks = [block for segment in segments for block in text_blocks(segment, block_bytes)]
        assert b"".join(map(read_text, blocks)) == text
        assert locate_line(blocks[0], 0) == f"{path}:2"
        assert sum(count_segment(segment, None) for segment in segments) == text.count(b"\n")
