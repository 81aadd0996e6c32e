from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.cli.text import aligned, read_text, write_text
from bagpipe.errors import InputError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    write_text("--out", path, "µs\n")
    assert read_text("--model", path) == "µs\n"


def test_messages_name_flag_and_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--model: cannot read /no/such: "):
        read_text("--model", "/no/such")
    with pytest.raises(InputError, match=r"^--out: cannot write /no/such/file: "):
        write_text("--out", "/no/such/file", "")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"^--model: cannot read .*bytes: .*utf-8"):
        read_text("--model", str(tmp_path / "bytes"))


def test_columns_are_aligned() -> None:
    assert list(aligned([("stage", "ms"), ("0", "12.5")])) == ["stage  ms", "0      12.5"]
