"""Export of a running pipeline: dense weights, and rows of the store, by the names of a plain torchrec model.

model ──capture──> dense weights, optimizer state ─┐
store ──StoredRows──> rows of each table           ├──> one folder, written by rank 0
model's collections ──tables_of──> names           ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bagpipe
from bagpipe.checkpoint.dense_state import capture
from bagpipe.checkpoint.export import FORMATS, Exported, ExportTable, add_dense, add_rows, check_size, write_dcp
from bagpipe.checkpoint.stored_rows import StoredRows
from bagpipe.embedding.torchrec_collections import CachedEmbeddingBagCollection, CachedEmbeddingCollection
from bagpipe.errors import InputError
from bagpipe.jobs.open_job import OpenJob
from bagpipe.serving.export_folder import ExportSource, write_export
from bagpipe.serving.manifest import ExportManifest
from bagpipe.serving.program import columns_of
from bagpipe.serving.table_tensors import decay_of
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.types.schema import DataSchema, Feature, Table
from bagpipe.util.outputs import new_folder

__all__ = ["export", "tables_of"]


def export(job: OpenJob, model: ModelParts, folder: Path, *, file_format: str, max_bytes: int, step: int) -> None:
    """Write weights and optimizer state. By all ranks alike, at rest and with a current store.

    Args:
        job: holds the store.
        model: gives the names.
        folder: new, or empty.
        file_format: one of `FORMATS`.
        max_bytes: limit on the size of the tables.
        step: batches trained, for the files' metadata.

    Raises:
        InputError: the folder cannot be written, the format is unknown, or the tables are larger than `max_bytes`.
        StoreError: the store failed.
        JobError: the disk is full.
    """
    if file_format not in FORMATS:
        raise InputError(f"format must be one of {', '.join(FORMATS)}, got {file_format!r}")
    ranks = job.ranks
    ranks.gather(None)  # all have written their rows
    error: Exception | None = None
    if ranks.is_first:
        try:
            _write(job, model, folder, file_format, max_bytes, step)
        except Exception as caught:  # any: the other ranks wait
            error = caught
    text = ranks.share(None if error is None else str(error))
    if error is not None:
        raise error
    if text is not None:
        raise InputError(f"rank 0: {text}")


def tables_of(model: ModelParts) -> list[ExportTable]:
    """Tables of the model's collections, under every name that a collection has in the model."""
    num_rows = {table.name: table.rows for table in model.rows.tables}
    return [
        ExportTable(name=f"{path}.{config.name}", table=table, num_rows=num_rows[table])
        for path, tables in _collections(model.converted.model)
        for config, table in tables
    ]


def _write(job: OpenJob, model: ModelParts, folder: Path, file_format: str, max_bytes: int, step: int) -> None:
    rows, tables, dense = StoredRows(job.store), tables_of(model), Exported()
    trained = model.converted.model
    add_dense(capture(job.engine.cache.streams, trained, model.optimizer).get(), list(trained.state_dict()), dense)
    if file_format == "dcp":
        check_size(rows, tables, max_bytes)
        add_rows(rows, tables, dense, job.engine.cache.history)
        write_dcp(dense, folder)
        return
    for table in tables:
        check_size(rows, [table], max_bytes)
    source = ExportSource(
        manifest=_manifest(model, step, decay_of(model.rows, job.engine.cache.history)),
        rows=rows,
        history=job.engine.cache.history,
        tables=tuple(tables),
        weights=dense.weights,
        states=dense.states,
        save_program=None,
    )
    with new_folder(folder, "--out") as temporary:
        write_export(source, temporary)


def _manifest(model: ModelParts, step: int, decay: Mapping[str, float | None]) -> ExportManifest:
    """Without tables and files."""
    trained = model.converted.model
    bags = {
        module: module.table_names for module in trained.modules() if isinstance(module, CachedEmbeddingBagCollection)
    }
    read = {ref.feature: model.rows.tables[ref.table].name for ref in model.converted.features}
    return ExportManifest(
        step=step,
        checkpoint="",
        rows=model.rows,
        decay=decay,
        data=DataSchema(
            label="",
            dense=(),
            features=tuple(Feature(name=name, table=read[number]) for number, name in enumerate(model.features)),
            tables=tuple(Table(name=table.name, rows=table.rows, dim=table.dim) for table in model.rows.tables),
        ),
        columns=tuple(column for columns in columns_of(bags) for column in columns),
        program=False,
        no_program="a TrainPipeline's model takes the batches of its own loader",
        settings=model.facts,
        versions={"bagpipe": bagpipe.__version__, "torch": torch.__version__},
    )


def _collections(model: nn.Module) -> Iterator[tuple[str, list[tuple[Any, str]]]]:
    """Path of each collection's tables, and their configs with their names in the model."""
    for name, module in model.named_modules(remove_duplicate=False):
        path = f"{name}." if name else ""
        if isinstance(module, CachedEmbeddingBagCollection):
            yield f"{path}embedding_bags", list(zip(module.embedding_bag_configs(), module.table_names, strict=True))
        elif isinstance(module, CachedEmbeddingCollection):
            yield f"{path}embeddings", list(zip(module.embedding_configs(), module.table_names, strict=True))
