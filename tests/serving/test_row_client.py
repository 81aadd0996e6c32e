"""`RowClient` over files: rows, initial rows, and what it refuses. `test_live_rows` has the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE, initial_weights
from bagpipe.serving import RowClient
from bagpipe.types.splitmix64 import hash_ids
from tests.serving.exports import SCHEMA, exported, source_of, store_of, write_rows

IDS = {
    "user": np.array([5, -3, 5, 2**62, -(2**63)]),
    "item": np.array([0, 49, 7]),
    "shop": np.array([], np.int64),
    "city": np.arange(-60, 60),
}


def expected_of(store, name: str, ids: np.ndarray) -> np.ndarray:
    """The rows of a store, or their initial values."""
    number = [table.name for table in SCHEMA.tables].index(name)
    table, dtype = SCHEMA.tables[number], SCHEMA.dtype_of(number)
    read = store.read(number, ids)
    stored = torch.from_numpy(read.rows).view(TORCH_DTYPE[dtype])[:, : table.dim]
    initial = initial_weights(table, ids, seed=SCHEMA.seed, dtype=dtype)
    return torch.where(torch.from_numpy(read.found)[:, None], stored, initial).float().numpy()


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    with store_of(f"{tmp_path}".replace("/", "-")) as store:
        store.claim()
        write_rows(store, np.random.default_rng(1), 30)
        return {p: exported(source_of(store, 5, p), tmp_path / p) for p in ("exact", "fp16", "int8")}


def test_vectors_are_the_rows_or_their_initial_values(folders: dict[str, Path], tmp_path: Path) -> None:
    with store_of(f"{tmp_path}".replace("/", "-")) as store, RowClient.open(folders["exact"], verify=True) as client:
        client.ping()
        found = client.read(IDS)
        assert list(found) == list(IDS)
        for name, ids in IDS.items():
            expected = expected_of(store, name, ids)
            assert found[name].dtype == client.dtype == np.float32
            np.testing.assert_array_equal(found[name], expected)
        halves, codes = client.read_fp16(IDS), client.read_int8(IDS)
        for name, values in found.items():
            np.testing.assert_array_equal(halves[name], values.astype(np.float16))
            steps = np.ptp(values, axis=1, keepdims=True) / 255 if len(values) else values
            assert (np.abs(codes[name].decoded() - values) <= steps * 0.5001 + 1e-6).all()


def test_rows_in_fewer_bits_are_near(folders: dict[str, Path]) -> None:
    exact = RowClient.open(folders["exact"]).read(IDS)
    for precision, share in (("fp16", 2.0**-11), ("int8", 0.5001 / 255)):
        found = RowClient.open(folders[precision], verify=True).read(IDS)
        for name, values in exact.items():
            width = np.abs(values).max(1, keepdims=True, initial=0) * (2 if precision == "int8" else 1)
            assert (np.abs(found[name] - values) <= width * share + 1e-6).all()


def test_raw_ids_of_a_hashed_table_are_hashed_as_by_the_reader(folders: dict[str, Path]) -> None:
    client = RowClient.open(folders["exact"])
    raw = np.array([-1, 2**40])
    assert client.hashed("item", raw).tolist() == hash_ids(raw, 50).tolist()
    with pytest.raises(InputError, match="takes any id"):
        client.hashed("user", raw)


def test_what_cannot_be_read_gets_one_line(folders: dict[str, Path]) -> None:
    client = RowClient.open(folders["exact"])
    for ids, words in (
        ({"users": IDS["user"]}, "no table 'users': expected one of user, item, shop, city"),
        ({"user": [1]}, "must be an int64 array"),
        ({"user": np.array([1], np.int32)}, r"int64 array \[n\], got int32 \[1\]"),
        ({"user": np.ones((1, 1), np.int64)}, r"got int64 \[1, 1\]"),
        ({"item": np.array([3, 50])}, "table 'item' has rows 0 to 49, got id 50"),
        ({"item": np.array([-1])}, "got id -1"),
    ):
        with pytest.raises(InputError, match=words):
            client.read(ids)


def test_reading_rows_needs_no_torch() -> None:
    code = (
        "import sys, bagpipe.serving; bagpipe.serving.RowClient\n"
        "import bagpipe.serving.file_rows\n"
        "assert not {'torch', 'safetensors', 'xxhash', 'redis'} & sys.modules.keys()\n"
        "import bagpipe.serving.live_rows\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
