"""The identity that a trainer presents to a restarted cacher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from cacher.identity import _PLANNING_CODE, identity_of


def test_another_size_time_name_or_layout_is_another_identity(tmp_path: Path) -> None:
    path, other = tmp_path / "day", tmp_path / "other"
    path.write_text("text")
    known = identity_of([str(path)], "lines")
    assert known == identity_of([str(path)], "lines")
    assert known["data"].startswith("1 files of 4 bytes (")
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = identity_of([str(path)], "lines")
    path.write_text("a text")
    grown = identity_of([str(path)], "lines")
    path.rename(other)
    moved = identity_of([str(other)], "lines")
    found = [known, touched, grown, moved, identity_of([str(other)], "pages"), identity_of([], "lines")]
    assert len({identity["data"] for identity in found}) == len(found)
    assert len({identity["code"] for identity in found}) == 1


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone: No such file or directory$"):
        identity_of([str(tmp_path / "gone")], "lines")


def test_the_code_digest_covers_every_planning_package() -> None:
    """A moved package must not drop out of the digest silently."""
    assert all(list(folder.glob("*.py")) for folder in _PLANNING_CODE)
