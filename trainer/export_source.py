"""`source_of`: what `trainer export` writes of a checkpoint; builds its model to learn names and to make the program.

checkpoint ──settings──> build_model ──names_of──> tables, dense weights
           ──dense state, or averages───────────> weights ─┬──> ExportSource
           ──row files──> CheckpointRows                   ├──as_dense_part──> save_program
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import bagpipe
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import DenseState, combine, load
from bagpipe.checkpoint.export import Exported, ExportTable, add_dense, check_size, check_tables, history_of
from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.checkpoint.manifest import DATA_COLUMNS
from bagpipe.config.sections import ModelConfig
from bagpipe.embedding.materialise import materialise
from bagpipe.embedding.table_configs import collections_of, configs_of, table_names_of
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.models.torchrec_models import build_model, num_dense_inputs
from bagpipe.serving.export_folder import ExportSource
from bagpipe.serving.manifest import Column, ExportManifest, Precision
from bagpipe.serving.program import DensePart, NoProgram, as_dense_part, save_program
from bagpipe.serving.table_tensors import decay_of
from bagpipe.training.weight_average import WeightAverage
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.settings import with_recorded

__all__ = ["SourceOptions", "built_model", "names_of", "source_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of an export.

    Attributes:
        with_rows: write the rows; else they stay in the store.
        precision: of the rows.
        with_states: write optimizer states.
        averages: dense weights are the moving averages.
        with_program: export the dense part as a program, too.
        max_bytes: limit of one table in memory.
    """

    with_rows: bool = True
    precision: Precision = "exact"
    with_states: bool = True
    averages: bool = False
    with_program: bool = True
    max_bytes: int = 1 << 62


def source_of(
    checkpoint: Checkpoint, options: SourceOptions, work: Path, *, on_note: Callable[[str], None]
) -> ExportSource:
    """The source of an export.

    Args:
        checkpoint: a valid checkpoint.
        options: what to write.
        work: a folder for the program, until it is written.
        on_note: called with a line if the model has no program.

    Raises:
        InputError: the checkpoint has not trained, is of another model, or has a table that is too large.
    """
    manifest = checkpoint.manifest
    schema = RowSchema.from_json(manifest.row_schema)
    model, data = built_model(checkpoint)
    tables, dense = names_of(model, schema)
    check_tables(schema, tables)
    if not manifest.parts:
        raise InputError(f"the checkpoint of step {manifest.step} has no dense part: its job has not trained")
    state = combine(load(checkpoint.folder, part.dense) for part in manifest.parts)
    found = Exported()
    add_dense(state, dense, found)
    averages = _averages(state, manifest.step) if options.averages else {}
    found.weights.update(averages)
    rows, history = CheckpointRows(checkpoint.folder, manifest, schema), history_of(schema, state)
    if options.with_rows:
        for table in tables:
            check_size(rows, [table], options.max_bytes)
    columns: tuple[Column, ...] = ()
    program, reason = None, ""
    if options.with_program:
        try:
            part = as_dense_part(model)
            columns = part.columns
            program = _program(part, state, averages, data, manifest.settings, work)
        except NoProgram as error:
            reason = str(error)
            on_note(f"no program is exported: {reason}")
    return ExportSource(
        manifest=ExportManifest(
            step=manifest.step,
            checkpoint=manifest.checkpoint_id,
            rows=schema,
            decay=decay_of(schema, history),
            data=data,
            columns=columns,
            program=program is not None,
            no_program=reason,
            rows_in="files" if options.with_rows else "store",
            precision=options.precision,
            has_states=options.with_states,
            averages=options.averages,
            settings={key: value for key, value in manifest.settings.items() if key != DATA_COLUMNS},
            versions={"bagpipe": bagpipe.__version__, "torch": torch.__version__},
        ),
        rows=rows,
        history=history,
        tables=tuple(tables) if options.with_rows else (),
        weights=found.weights,
        states=found.states,
        save_program=program,
    )


def built_model(checkpoint: Checkpoint) -> tuple[nn.Module, DataSchema]:
    """The model of a checkpoint's settings, its tables on the meta device, and the columns of its data.

    Raises:
        InputError: the model cannot be built.
    """
    settings = checkpoint.manifest.settings
    data = DataSchema.from_json(settings[DATA_COLUMNS])
    return build_model(data, with_recorded(ModelConfig(), "model", settings)), data


def names_of(model: nn.Module, schema: RowSchema) -> tuple[list[ExportTable], list[str]]:
    """Names of the tables and dense weights in a model.

    Args:
        model: with torchrec's collections.
        schema: of the rows; says which tables are bounded.
    """
    bounds = {table.name: table.rows for table in schema.tables}
    named = table_names_of(model)
    tables: list[ExportTable] = []
    prefixes: list[str] = []
    for collection, path in collections_of(model).items():
        prefix = f"{path}." if path else ""
        prefixes.append(prefix)
        inner = "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"
        for config, table in zip(configs_of(collection), named[collection], strict=True):
            num_rows = None if bounds.get(table) is None else config.num_embeddings
            tables.append(ExportTable(name=f"{prefix}{inner}.{config.name}", table=table, num_rows=num_rows))
    dense = [name for name in model.state_dict() if not name.startswith(tuple(prefixes))]
    return tables, dense


def _program(
    part: DensePart,
    state: DenseState,
    averages: Mapping[str, Tensor],
    data: DataSchema,
    settings: Mapping[str, Any],
    work: Path,
) -> Callable[[Path], object]:
    """Export the program now, so that a model without one is known; the result moves the file to its place."""
    dtype = TORCH_DTYPE[settings["run.dtype"]]
    materialise(part.model, torch.device("cpu"), dtype)
    state.restore(part.model)
    weights = dict(part.model.named_parameters())
    with torch.no_grad():
        for name, average in averages.items():
            weights[name].copy_(average)
    path = work / "dense.pt2"
    save_program(part, path, num_dense=num_dense_inputs(data), dtype=dtype)
    return partial(shutil.move, path)


def _averages(state: DenseState, step: int) -> dict[str, Tensor]:
    found = state.of_part(WeightAverage.name)
    if not found:
        raise InputError(f"--averages: the checkpoint of step {step} has none: its job had optim.ema_decay = 0")
    return found
