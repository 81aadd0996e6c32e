from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from data.string_hash import hash_strings, is_text

TEXTS = ["", "a", "shoe", "naïve", "x" * 300]

#: XXH3-64 as signed integers. A change here changes which row a string means, in every data set there is.
GOLDEN = {
    0: [3244421341483603138, -1817709641818812897, 4339175111479047701, -3689367214560413688, -6498214460798782124],
    7: [-7981820518085198152, -7001539911779966828, -5232245942057005511, 5747993299768815747, 7327251444594653761],
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_a_string_has_the_same_id_for_ever(seed: int) -> None:
    assert hash_strings(pa.array(TEXTS), seed).tolist() == GOLDEN[seed]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
    ids=str,
)
def test_the_layout_of_the_column_does_not_matter(kind: pa.DataType) -> None:
    texts = pa.array(TEXTS).cast(kind)
    assert is_text(kind)
    assert hash_strings(texts).tolist() == GOLDEN[0]
    assert hash_strings(texts.slice(1, 2)).tolist() == GOLDEN[0][1:3]


def test_numbers_and_lists_are_no_text() -> None:
    assert not is_text(pa.int64())
    assert not is_text(pa.list_(pa.string()))
    assert not is_text(pa.dictionary(pa.int8(), pa.int64()))


def test_another_process_computes_the_same_ids() -> None:
    program = f"import pyarrow as pa; from data.string_hash import *; print(*hash_strings(pa.array({TEXTS!r}), 7))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert [int(word) for word in printed.split()] == GOLDEN[7]


def test_no_strings() -> None:
    assert hash_strings(pa.array([], pa.string())).dtype == np.int64
