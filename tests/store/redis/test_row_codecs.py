from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.redis.routing import BucketCommand
from bagpipe.store.redis.row_codecs import max_command_rows, runs_of
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable


@pytest.mark.parametrize(("row_bytes", "num_rows"), [(4, 16_384), (256, 256), (1 << 16, 1), (1 << 20, 1)])
def test_a_command_is_bounded_in_bytes(row_bytes: int, num_rows: int) -> None:
    assert max_command_rows(row_bytes) == num_rows


def test_runs_double_up_to_a_bound() -> None:
    """The first is small, so that the server begins early."""
    commands = [BucketCommand(bucket, 10 * bucket, 10 * bucket + 10, 0) for bucket in range(20)]
    assert [len(run) for run in runs_of(commands, 1, 20, 60)] == [2, 4, 6, 6, 2]
    same = [BucketCommand(7, 0, 10, 0), BucketCommand(7, 10, 20, 1)]
    assert [len(run) for run in runs_of(same, 1, 100, 100)] == [1, 1], "a transaction opens each bucket once"
    apart = [BucketCommand(1, 0, 10, 0), BucketCommand(3, 20, 30, 0)]
    assert [len(run) for run in runs_of(apart, 1, 100, 100)] == [1, 1]


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
