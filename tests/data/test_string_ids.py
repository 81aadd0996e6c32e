from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from data.string_dictionary import write_dictionary
from data.string_hash import hash_strings
from data.string_ids import StringIds

TEXTS = pa.array(["b", "new", "a"]).dictionary_encode()


def test_strings_are_hashed_or_looked_up(tmp_path: Path) -> None:
    path = str(tmp_path / "d.csv")
    write_dictionary(path, pa.array([b"a", b"b"]), np.array([1, 1]), 0)
    assert StringIds(seed=3).ids_of(TEXTS).tolist() == hash_strings(TEXTS, 3).tolist()
    assert StringIds(dictionary=path).ids_of(TEXTS).tolist() == [2, 0, 1]
