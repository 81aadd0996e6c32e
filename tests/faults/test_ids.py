"""Ids outside their table are refused by name, whatever their size, before any row is read or written."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from data.parquet import ParquetSource
from tests.data.test_parquet import read, table, write
from tests.store.clients import client_of
from tests.system.programs import run_forked

#: For a table of 10 rows: one below, one above, and values that truncation to 32 bits, a float or a hash turns into
#: ids.
OUTSIDE = [-1, 10, 1 << 32, 1 << 40, (1 << 53) + 1, -(1 << 63), (1 << 63) - 1]


@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("row", [0, 4])
def test_table_id_and_row_are_named(tmp_path: Path, value: int, row: int) -> None:
    bags = [[1], [2], [3], [4], [5]]
    bags[row] = [6, value, 7]
    columns = {
        "items": pa.array(bags, pa.list_(pa.int64())),
        "items_w": pa.array([[1.0] * len(bag) for bag in bags], pa.list_(pa.float64())),
    }
    path, schema = write(tmp_path, table(**columns))
    said = f"{path}: row {row} (from 0): expected ids of table 'item' in [0, 10), got {value}"
    with pytest.raises(InputError, match=re.escape(said)):
        read(ParquetSource.at(path, schema_path=schema))


@pytest.mark.redis
@pytest.mark.multiproc
def test_nothing_is_written_if_the_first_batch_has_one(
    redis_server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    bags = pa.array([[1], [2], [1 << 40], [4], [5]], pa.list_(pa.int64()))
    weights = pa.array([[1.0]] * 5, pa.list_(pa.float64()))
    path, schema = write(tmp_path, table(items=bags, items_w=weights))
    data = ["--data.path", path, "--data.format", "parquet", "--data.schema", schema, "--data.workers", "0"]
    sizes = ["--data.batch_size", "5", "--cache.rows", "100", "--data.eval_fraction", "0", "--model.name", "deepfm"]
    done = run_forked([*data, *sizes, "--store.url", redis_server.url, "--store.namespace", namespace], tmp_path)
    assert done.code == 2
    assert "row 2 (from 0): expected ids of table 'item' in [0, 10), got 1099511627776" in done.error_line
    with client_of(redis_server.url) as client:
        assert not [key for key in client.keys(f"{namespace}:{{*}}") if client.type(key) == b"hash"]
