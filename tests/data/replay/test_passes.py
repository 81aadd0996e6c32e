from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from bagpipe.types.batch import Batch
from bagpipe.util.process_pool import ProcessPool
from data.formats import open_source
from data.replay.log_tables import LogTables
from data.replay.options import parse_sweep
from data.replay.passes import Found, SharedLog, run_pass
from data.replay.records import Setting
from data.replay.row_batch_file import RowBatchFile
from data.replay.row_counter import RowCounter
from data.replay.scanned_log import EXPIRED, ScannedLog, scan
from tests.data.replay.logs import write_log


def plain(batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]:
    return batches


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ScannedLog]:
    """In ten batches; rows expire from the fifth on."""
    flags = ["--data.path", str(write_log(tmp_path)), "--data.format", "parquet", "--data.batch_size", "60"]
    flags += ["--data.expire_after", "3", "--data.expire_unit", "steps", "--data.expire_every", "2"]
    (config,) = parse_sweep(flags).configs
    source = open_source(config.data)
    tables = LogTables.of(source.schema, config)
    with RowBatchFile(tmp_path) as row_batches, RowBatchFile(tmp_path, EXPIRED) as expired:
        yield scan(config, source, tables, RowCounter(tables.spec(config)), row_batches, plain, expired=expired)


def untimed(found: Found) -> dict[str, object]:
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {**values, "misses": found.misses.tolist(), "dropped": found.dropped.tolist(), "seconds": None}


def run_shared(work: tuple[SharedLog, Setting, int]) -> Found:
    shared, setting, number = work
    return shared.run(setting, number)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(2) as found:
        yield found


@pytest.mark.multiproc
@pytest.mark.parametrize("policy", ["belady-window", "lru", "offline-belady", "static-hot"])
def test_a_pass_elsewhere_finds_the_same(log: ScannedLog, tmp_path: Path, policy: str, pool: ProcessPool) -> None:
    setting = Setting(policy=policy, lookahead=4, cache_rows=500, batch_size=60, world_size=1)
    here = run_pass(setting, log, tmp_path, plain, "")
    assert here.dropped.sum() > 0
    shared = SharedLog.of(log, tmp_path)
    assert shared.log.table_of_row.size == 0
    elsewhere = pool.map_unordered(run_shared, [(shared, setting, number) for number in (1, 2)])
    assert [untimed(found) for found in elsewhere] == [untimed(here)] * 2
