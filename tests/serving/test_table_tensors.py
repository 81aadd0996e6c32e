"""Shapes of a table's tensors are known before its rows are read. `test_delta` compares their words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagpipe.serving.table_tensors import specs_of
from tests.serving.exports import source_of, store_of, write_rows


@pytest.mark.parametrize("precision", ["exact", "fp16", "int8"])
def test_layouts_are_those_of_the_tensors(precision, tmp_path: Path) -> None:
    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, np.random.default_rng(1), 9)
        source = source_of(store, 1, precision)
        for table, layout in zip(source.tables, source.layouts(), strict=True):
            tensors = source.tensors(table)
            assert layout.place == tensors.place
            for file, words in tensors.by_file.items():
                assert specs_of(layout.by_file[file]) == specs_of(words)
