from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from bagpipe.config.sections import Config, DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.formats import open_source
from data.replay.log_tables import LogTables
from data.replay.row_batch_file import RowBatchFile
from data.replay.row_counter import RowCounter
from data.replay.scanned_log import EXPIRED, ScannedLog, Watch, scan
from tests.data.replay.logs import write_log


def plain(batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]:
    return batches


def scanned(config: Config, watch: Watch = plain, row_batches: RowBatchFile | None = None) -> ScannedLog:
    source = open_source(config.data)
    tables = LogTables.of(source.schema, config)
    return scan(config, source, tables, RowCounter(tables.spec(config)), row_batches, watch)


def config_of(path: Path, **values: object) -> Config:
    return Config(data=DataConfig(path=str(path), format="parquet", eval_fraction=0.0, **values))  # type: ignore[arg-type]


def test_the_first_pass_scans_the_log(tmp_path: Path) -> None:
    config = config_of(write_log(tmp_path), batch_size=64)
    with RowBatchFile(tmp_path) as row_batches:
        log = scanned(config, row_batches=row_batches)
        batches = list(log.read(plain, "again"))
        rows = [len(row_batches[number]) for number in range(len(row_batches))]
    assert (log.examples, log.batches, log.batch_size) == (600, 10, 64)
    assert log.ids == sum(len(batch.values) for batch in batches)
    assert (log.largest, log.largest_at) == (max(rows), rows.index(max(rows)))
    assert log.num_rows == log.first_touches.sum() > log.largest


def test_rows_that_expire_are_numbered_and_those_that_begin_are_counted(tmp_path: Path) -> None:
    config = config_of(write_log(tmp_path), batch_size=32, expire_after=3.0, expire_unit="steps", expire_every=2)
    source = open_source(config.data)
    tables = LogTables.of(source.schema, config)
    with RowBatchFile(tmp_path) as row_batches, RowBatchFile(tmp_path, EXPIRED) as expired:
        counter = RowCounter(tables.spec(config))
        log = scan(config, source, tables, counter, row_batches, plain, expired=expired)
        last_use: dict[int, int] = {}
        births = deleted = 0
        for number in range(log.batches):
            gone = sorted(row for row, use in last_use.items() if number % 2 == 0 and number - use > 3)
            assert sorted(expired[number].tolist()) == gone
            deleted += len(gone)
            last_use = {row: use for row, use in last_use.items() if row not in set(gone)}
            rows = row_batches[number].tolist()
            births += len(set(rows) - last_use.keys())
            last_use |= dict.fromkeys(rows, number)
    assert log.rows_expire
    assert (log.births.sum(), log.rows_deleted) == (births, deleted)
    assert births > log.num_rows > births - deleted


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"log.parquet: the log is empty, expected at least one example"):
        scanned(config_of(write_log(tmp_path, rows=1)), lambda batches, label, total: ())
