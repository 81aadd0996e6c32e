"""Exports of small tables, from the rows of a store in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from bagpipe.cache.row_history import RowHistory
from bagpipe.checkpoint.export import ExportTable
from bagpipe.checkpoint.stored_rows import StoredRows
from bagpipe.serving.delta import FolderBase, write_delta
from bagpipe.serving.export_folder import ExportSource, write_export
from bagpipe.serving.manifest import ExportManifest, Precision
from bagpipe.store.interface import Store
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.validation import row_dtype
from bagpipe.types.schema import DataSchema, Feature, RowSchema, RowTable, Table
from bagpipe.util.outputs import new_folder

SCHEMA = RowSchema(
    tables=(
        RowTable(name="user", dim=3),
        RowTable(name="item", dim=4, rows=50, dtype="bfloat16"),
        RowTable(name="shop", dim=2, dtype="float16"),
        RowTable(name="city", dim=5, optimizer="adam"),
    ),
    optimizer="rowwise_adagrad",
    seed=7,
)
DATA = DataSchema(
    label="label",
    dense=(),
    features=tuple(Feature(name=table.name, table=table.name) for table in SCHEMA.tables),
    tables=tuple(Table(name=table.name, rows=table.rows) for table in SCHEMA.tables),
)
TABLES = tuple(
    ExportTable(name=f"bags.embedding_bags.{table.name}", table=table.name, num_rows=table.rows)
    for table in SCHEMA.tables
)


def store_of(name: str) -> MemoryStore:
    return MemoryStore(SCHEMA, name=name)


def write_rows(store: Store, random: np.random.Generator, count: int) -> None:
    """Write `count` random rows of every table, some of them again."""
    for number, table in enumerate(SCHEMA.tables):
        low, high = (0, table.rows) if table.rows else (-60, 60)
        ids = np.unique(random.integers(low, high, count))
        values = torch.from_numpy(random.standard_normal((len(ids), SCHEMA.row_width(number))))
        dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
        words = values.to(dtype[SCHEMA.dtype_of(number)])
        as_words = words.view(torch.uint16) if words.itemsize == 2 else words
        store.write(number, ids, as_words.numpy().astype(row_dtype(SCHEMA, number), copy=False))


def source_of(store: Store, step: int, precision: Precision = "exact", *, states: bool = True) -> ExportSource:
    return ExportSource(
        manifest=ExportManifest(
            step=step,
            checkpoint=f"lineage:token:{step}",
            rows=SCHEMA,
            data=DATA,
            columns=(),
            program=False,
            precision=precision,
            has_states=states,
        ),
        rows=StoredRows(store),
        history=RowHistory(SCHEMA, torch.device("cpu")),
        tables=TABLES,
        weights={"top.weight": torch.full((2, 3), float(step))},
        states={"top.weight.exp_avg": torch.full((2, 3), step / 2)},
        save_program=partial(_save_program, step),
    )


def _save_program(step: int, path: Path) -> None:
    path.write_bytes(b"program %d" % step)


def exported(source: ExportSource, folder: Path) -> Path:
    with new_folder(folder, "--out") as temporary:
        write_export(source, temporary)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pair_of(folder: Path) -> tuple[Path, Path]:
    """An export and a delta from it, in a folder that also has the later export, B."""
    with store_of(f"{folder}".replace("/", "-")) as store:
        store.claim()
        random = np.random.default_rng(3)
        write_rows(store, random, 20)
        base = exported(source_of(store, 10), folder / "A")
        write_rows(store, random, 10)
        exported(source_of(store, 20), folder / "B")
        delta = folder / "delta"
        delta.mkdir()
        write_delta(source_of(store, 20), FolderBase(base), delta)
        return base, delta
