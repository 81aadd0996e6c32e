from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.cli.text import aligned, write_text
from bagpipe.errors import InputError
from bagpipe.util.documents import file_text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    write_text("--out", path, "µs\n")
    assert file_text(path, subject="--model") == "µs\n"


def test_messages_name_flag_and_file() -> None:
    with pytest.raises(InputError, match=r"^--out: cannot write /no/such/file: "):
        write_text("--out", "/no/such/file", "")


def test_columns_are_aligned() -> None:
    assert list(aligned([("stage", "ms"), ("0", "12.5")])) == ["stage  ms", "0      12.5"]
