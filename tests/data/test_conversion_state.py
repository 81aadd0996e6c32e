from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.errors import InputError
from data.conversion_manifest import MANIFEST, ConversionManifest, PartRecord
from data.conversion_state import check_finished, finished_parts
from data.text_files import list_files

RECORD = PartRecord(part="part-00000.parquet", rows=1, skipped=0, num_bytes=1, xxh3_64="00")


def test_a_folder_is_refused_until_its_conversion_has_ended(tmp_path: Path) -> None:
    with ConversionManifest(tmp_path, inputs={"a": "1 bytes"}, options={}) as manifest:
        (tmp_path / RECORD.part).touch()
        for _ in range(2):
            with pytest.raises(
                InputError, match=rf"^{tmp_path}: its conversion has not ended, .* convert … {tmp_path}`"
            ):
                list_files(str(tmp_path))
            manifest.add(RECORD)
        manifest.finish([RECORD.part])
    assert list_files(str(tmp_path)) == (str(tmp_path / RECORD.part),)


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"[1]\n", b'{"conversion": 1}\n', b'{"notes": "mine"}\n'])
def test_a_foreign_file_of_that_name_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    check_finished(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "parts"), [(b'{"finished": 3}', 3), (RECORD.line(), None), (b"{", None), (b"3", None)]
)
def test_the_last_line_of_a_finished_manifest(line: bytes, parts: int | None) -> None:
    assert finished_parts(line) == parts
