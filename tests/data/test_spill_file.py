from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.spill_file import SpillFile


def test_words_come_back_from_any_place(tmp_path: Path) -> None:
    with SpillFile(tmp_path, np.uint32) as file:
        file.write(5, np.array([7, 8], dtype=np.uint32))
        file.write(1, np.array([1, 0, 2, 0, 3], dtype=np.uint32)[::2])
        assert file.read(0, 7).tolist() == [0, 1, 2, 3, 0, 7, 8]
        words = np.zeros(4, dtype=np.uint32)
        file.read_into(2, words[1:3])
        assert words.tolist() == [0, 2, 3, 0]
        assert file.read(3, 0).tolist() == []
        with pytest.raises(OSError, match="a temporary file ends early"):
            file.read(6, 2)
        assert not list(tmp_path.iterdir())
