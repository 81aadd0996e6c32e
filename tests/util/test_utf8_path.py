from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagpipe.util.utf8_path import utf8_path

ODD = os.fsdecode(b"caf\xe9")


def test_a_path_in_utf_8_is_the_path_itself(tmp_path: Path) -> None:
    path = tmp_path / "café" / "new"
    with utf8_path(path) as same:
        assert same is path


def test_other_paths_are_the_same_file_while_the_block_lasts(tmp_path: Path) -> None:
    (tmp_path / ODD).mkdir()
    new = tmp_path / ODD / "new.txt"
    with utf8_path(new) as path:
        assert path.name == new.name
        assert str(path).isascii()
        path.write_text("one")
    assert new.read_text() == "one"
    assert not path.exists()
    odd = new.rename(tmp_path / ODD / ODD)
    with utf8_path(odd) as path:
        assert str(path).isascii()
        assert path.samefile(odd)
        assert path.read_text() == "one"
    assert not path.exists()


@pytest.mark.parametrize("path", [Path(ODD), Path(ODD, "file")])
def test_what_is_not_there_is_told_by_its_own_name(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"caf\\udce9'"), utf8_path(path):
        pass
