"""Annotated files, and the true next uses of batches, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bagpipe.config.sections import DataConfig
from bagpipe.types.batch import NO_USE, Batch
from data.formats import open_source
from data.loader import open_loader
from data.next_use_source import told_source
from data.next_use_writer import NextUseOrder, write_annotated

SCHEMA = """
label = "y"
dense = []
[[sparse]]
name = "user"
table = "users"
[[sparse]]
name = "seen"
table = "items"
[[sparse]]
name = "item"
table = "items"
[tables.users]
hash = false
[tables.items]
hash = false
"""


def annotated(path: Path, rows: int, order: NextUseOrder, block_rows: int = 65_536) -> str:
    """An annotated file: a user (or none), items seen, and an item of their table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data.parquet import ParquetSource

    random = np.random.default_rng(rows)
    wide = [-1, 2**62, 2**62 + 1, 5, 6]
    table = {
        "y": pa.array(random.integers(0, 2, rows), pa.float32()),
        "user": pa.array([None if i % 7 == 3 else wide[k] for i, k in enumerate(random.integers(0, 5, rows))]),
        "seen": pa.array([random.integers(0, 30, random.integers(0, 4)).tolist() for _ in range(rows)]),
        "item": pa.array(random.integers(0, 30, rows)),
    }
    raw, schema = path.parent / "raw.parquet", path.parent / "schema.toml"
    pq.write_table(pa.table(table), raw)
    schema.write_text(SCHEMA)
    source = ParquetSource.at(str(raw), schema_path=str(schema), block_rows=block_rows)
    write_annotated(source, str(path), order)
    return str(path)


def told_batches(config: DataConfig, seed: int = 0) -> list[Batch]:
    """The training batches of annotated files."""
    source = told_source(open_source(config, seed), config, seed)
    assert source is not None, "the files are annotated"
    with open_loader(config, seed=seed, source=source) as loader:
        return list(loader)


def check_next_uses(batches: Sequence[Batch], tables: Sequence[int]) -> None:
    """Check that the largest next use of a row's occurrences is the next batch with the row. `tables`: by feature."""
    upcoming: dict[tuple[int, int], int] = {}
    for batch in reversed(batches):
        assert batch.next_use is not None
        features = np.repeat(np.arange(batch.num_features), np.diff(batch.feature_offsets()))
        found: dict[tuple[int, int], int] = {}
        for feature, row, next_use in zip(
            features.tolist(), batch.values.tolist(), batch.next_use.tolist(), strict=True
        ):
            key = tables[feature], row
            found[key] = max(found.get(key, -1), next_use)
        assert found == {key: upcoming.get(key, NO_USE) for key in found}, f"batch {batch.index}"
        upcoming.update(dict.fromkeys(found, batch.index))
