"""A folder that is not whole is refused. `test_row_client` reads rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError
from bagpipe.serving.file_rows import FileRows
from bagpipe.serving.manifest import MANIFEST, MODEL_FILE
from tests.serving.exports import exported, source_of, store_of, write_rows


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, np.random.default_rng(1), 9)
        folder = exported(source_of(store, 5), tmp_path / "out")
    FileRows(folder, verify=True).close()
    content = bytearray((folder / MODEL_FILE).read_bytes())
    content[-1] ^= 1
    (folder / MODEL_FILE).write_bytes(content)
    with pytest.raises(InputError, match="does not match its checksum"):
        FileRows(folder, verify=True)
    (folder / MODEL_FILE).write_bytes(content[:-1])
    with pytest.raises(InputError, match=rf"{MODEL_FILE}: expected [0-9]+ bytes, got"):
        FileRows(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(InputError, match=rf"{MANIFEST}: not valid JSON"):
        FileRows(folder)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        FileRows(tmp_path / "none")
