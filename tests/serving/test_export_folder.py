"""Sizes of exports. `test_row_client` and `test_delta` read them; `tests/trainer/test_export.py` makes real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from bagpipe.serving.manifest import MODEL_FILE
from bagpipe.serving.tensor_file import TensorFile
from tests.serving.exports import exported, source_of, store_of, write_rows


def test_rows_of_8_bits_are_a_quarter(tmp_path: Path) -> None:
    sizes = {}
    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, np.random.default_rng(0), 40)
        for precision in ("exact", "fp16", "int8"):
            folder = exported(source_of(store, 1, precision, states=False), tmp_path / precision)
            file = TensorFile(folder / MODEL_FILE)
            sizes[precision] = sum(
                spec.num_bytes for name, spec in file.specs.items() if name.startswith("bags.embedding_bags.city.w")
            )
            shutil.rmtree(folder)
    count = sizes["exact"] // (4 * 5)
    assert sizes == {"exact": count * 20, "fp16": count * 10, "int8": count * (5 + 8)}
