from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.redis.row_codecs import max_command_rows
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable


@pytest.mark.parametrize(("row_bytes", "num_rows"), [(4, 16_384), (256, 256), (1 << 16, 1), (1 << 20, 1)])
def test_a_command_is_bounded_in_bytes(row_bytes: int, num_rows: int) -> None:
    assert max_command_rows(row_bytes) == num_rows


@pytest.mark.redis
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("dim", "num_rows", "num_buckets"),
    [
        (1, 50_000, 1),  # many rows in one bucket
        (1, 5_000, 4096),  # more commands than fit in one send, about one row each
        (64, 20_000, 2),  # buckets of several commands
        (100_000, 20, 4),  # rows longer than a usual command and than the initial receive buffer
    ],
)
def test_rows_survive_being_cut_into_commands_and_frames(
    redis_server: EmbeddedServer, namespace: str, dim: int, num_rows: int, num_buckets: int
) -> None:
    schema = RowSchema(tables=(RowTable(name="t", dim=dim),), optimizer="sgd")
    rng = np.random.default_rng(0)
    ids = rng.permutation(2 * num_rows).astype(np.int64)
    rows = rng.random((num_rows, dim), np.float32)
    with RedisStore(redis_server.url, schema=schema, namespace=namespace, num_buckets=num_buckets) as store:
        store.write(0, ids[:num_rows], rows)
        result = store.read(0, ids)
        assert result.found[:num_rows].all()
        assert not result.found[num_rows:].any()
        assert (result.rows[:num_rows] == rows).all()
        assert not result.rows[num_rows:].any()
