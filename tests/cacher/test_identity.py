"""The identity of real files and of the planning code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from cacher.identity import _PLANNING_CODE, identity_of

MIB = 1 << 20


def change_of(before: bytes, after: bytes, *, full: bool = False) -> str | None:
    """The first difference between the identities of two contents of a file; None if they are equal."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "day")
        path.write_bytes(before)
        known = identity_of([str(path)], "lines", full=full)
        path.write_bytes(after)
        return known.first_change(identity_of([str(path)], "lines", full=full))


@given(st.binary(min_size=1, max_size=300), st.data(), st.booleans())
def test_any_changed_byte_is_seen(content: bytes, draw: st.DataObject, full: bool) -> None:
    place = draw.draw(st.integers(min_value=0, max_value=len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= draw.draw(st.integers(min_value=1, max_value=255))
    words = change_of(content, bytes(changed), full=full)
    assert words is not None
    assert words.endswith(f"has other content: the block at byte 0, of {len(content)} bytes, differs")


@settings(max_examples=10)
@given(st.integers(min_value=0, max_value=64 * MIB - 1))
def test_a_changed_byte_of_a_file_of_64_mib_is_seen(large: Path, place: int) -> None:
    known = identity_of([str(large)], "lines")
    with large.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    words = known.first_change(identity_of([str(large)], "lines"))
    start = place // (4 * MIB) * 4 * MIB
    assert words == f"{large} has other content: the block at byte {start}, of {4 * MIB} bytes, differs"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 64 MiB, most of it a hole."""
    path = tmp_path_factory.mktemp("large") / "day"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    return path


def test_full_sees_what_sampling_misses(tmp_path: Path) -> None:
    path, place = tmp_path / "day", 5 * MIB
    with path.open("wb") as file:
        file.truncate(100 * MIB)
    sampled, full = (identity_of([str(path)], "lines", full=full) for full in (False, True))
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"1")
    assert sampled.first_change(identity_of([str(path)], "lines")) is None
    words = full.first_change(identity_of([str(path)], "lines", full=True))
    assert words == f"{path} has other content: the block at byte 0, of {100 * MIB // 16} bytes, differs"


@given(st.binary(max_size=300))
def test_a_touched_copied_or_moved_file_is_the_same(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path, copy, moved = (Path(folder, name) for name in ("day", "copy", "moved"))
        path.write_bytes(content)
        known = identity_of([str(path)], "lines")
        os.utime(path, ns=(0, 0))
        shutil.copyfile(path, copy)
        path.rename(moved)
        assert known.first_change(identity_of([str(moved)], "lines")) is None
        assert known.first_change(identity_of([str(copy)], "lines")) is None


def test_a_swapped_file_is_named(tmp_path: Path) -> None:
    days = [tmp_path / f"day_{number}" for number in range(3)]
    for number, day in enumerate(days):
        day.write_text(f"day {number}")
    known = identity_of(list(map(str, days)), "lines")
    days[1].rename(tmp_path / "free")
    days[2].rename(days[1])
    (tmp_path / "free").rename(days[2])
    words = known.first_change(identity_of(list(map(str, days)), "lines"))
    assert words == f"{days[1]} has the content that {days[2]} had"


def test_data_without_files() -> None:
    known = identity_of([], "rows")
    assert known.files == ()
    assert known.first_change(identity_of([], "rows", full=True)) is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone: No such file or directory$"):
        identity_of([str(tmp_path / "gone")], "lines")
    with pytest.raises(InputError, match=r"Is a directory$"):
        identity_of([str(tmp_path)], "lines")


def test_the_code_digest_covers_every_planning_package() -> None:
    """A moved package must not drop out of the digest silently."""
    assert all(list(folder.glob("*.py")) for folder in _PLANNING_CODE)
    assert identity_of([], "lines").code == identity_of([], "pages").code
