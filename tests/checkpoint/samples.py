"""A small checkpoint with every feature: two ranks, two widths, a full file, changed, deleted and dirty rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import DenseState, capture, random_state
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.journal import RowWriter, save_dirty
from bagpipe.checkpoint.manifest import Manifest, Part, RowFile
from bagpipe.checkpoint.merge import merge_files
from bagpipe.pipeline.stream import NullStreams
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(
    tables=(
        RowTable(name="user", dim=3),
        RowTable(name="item", dim=4, rows=500),
        RowTable(name="shop", dim=3, rows=50),
    ),
    optimizer="rowwise_adagrad",
)
LINEAGE = "0123456789abcdef" * 2

#: Row values by (table, id), identified by the first weight.
Model = dict[tuple[int, int], float]


def requests(rows: Mapping[tuple[int, int], float], schema: RowSchema = SCHEMA) -> list[WriteRequest]:
    """Rows with all elements equal to the given number."""
    found = []
    for table in sorted({table for table, _ in rows}):
        ids = np.array([number for at, number in rows if at == table], np.int64)
        values = np.array([value for (at, _), value in rows.items() if at == table], schema.dtype)
        found.append(WriteRequest(table, ids, np.repeat(values[:, None], schema.row_width(table), axis=1)))
    return found


def deletions(keys: Collection[tuple[int, int]]) -> list[DeleteRequest]:
    """Deletions of rows by (table, id)."""
    return [
        DeleteRequest(table, np.array([number for at, number in keys if at == table], np.int64))
        for table in sorted({table for table, _ in keys})
    ]


def content(rows: CheckpointRows) -> Model:
    """All rows as a model. The elements of a row are equal."""
    return {
        (request.table, int(number)): float(row[0])
        for group in rows.requests()
        for request in group
        for number, row in zip(request.ids, request.rows, strict=True)
    }


def draw_rows(random: np.random.Generator, count: int) -> Model:
    tables = random.integers(0, len(SCHEMA.tables), count).tolist()
    ids = random.integers(-40, 40, count).tolist()
    return {key: float(np.float32(random.random())) for key in zip(tables, ids, strict=True)}


def model_and_optimizer(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after one step, so that there is optimizer state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def captured(model: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> DenseState:
    """Dense state of a model on the CPU, from `capture`."""
    return capture(NullStreams(), model, *optimizers, **options).get()


def save(
    folder: CheckpointFolder,
    generation: int,
    step: int,
    changes: list[Model],
    *,
    before: Checkpoint | None = None,
    base: tuple[RowFile, ...] | None = None,
    sources: tuple[Path, ...] = (),
    shares: Sequence[DenseState] = (),
    gone: Collection[tuple[int, int]] = (),
) -> Checkpoint:
    """Save and publish; `changes` by rank, and `shares` of the dense part if the ranks have divided it.

    Rank 0 deletes the rows of `gone` before the changes.
    """
    model, optimizer = model_and_optimizer()
    dense = captured(model, optimizer, rng=random_state(torch.device("cpu")))
    states = shares or [dense] * len(changes)
    where = folder.step_folder(generation, step)
    for rank, rows in enumerate(changes):
        writer = RowWriter(folder.generation_folder(generation), SCHEMA, rank=rank, epoch=step)
        names = np.array(list(rows), np.int64).reshape(-1, 2)
        try:
            writer.delete(deletions(gone if rank == 0 else ()), step - 1)
            writer.append(requests(rows), step)
            sealed = writer.seal(where, step)
        finally:
            writer.discard()
        part = Part(
            rank=rank,
            dense=states[rank].save(where, rank),
            rows=sealed,
            dirty=save_dirty(where, rank=rank, tables=names[:2, 0].astype(np.uint32), ids=names[:2, 1]),
            num_groups=(1, 2, 3, 4),
            progress={"samples": step * 7, "loss_sum": 0.1 * step, "reader_state": {"offset": 17, "batch": step}},
        )
        folder.write_part(generation, step, part)
    parts = folder.read_parts(generation, step, len(changes))
    assert parts is not None
    if base is None:
        base = () if before is None else before.manifest.row_files
    return folder.publish(
        manifest_of(generation, step, parts, base, before),
        (*sources, *(() if before is None else (before.folder,))),
    )


def manifest_of(
    generation: int,
    step: int,
    parts: tuple[Part, ...] = (),
    base: tuple[RowFile, ...] = (),
    before: Checkpoint | None = None,
) -> Manifest:
    return Manifest(
        lineage=LINEAGE,
        generation=generation,
        step=step,
        parent_checkpoint_id="" if before is None else before.manifest.checkpoint_id,
        token=f"{generation}-{LINEAGE}",
        epoch=1,
        world_size=len(parts),
        settings={"data.batch_size": 64, "optim.rows_lr": 0.02},
        row_schema=json.loads(json.dumps(SCHEMA.to_json())),
        identity={"path": "synthetic"},
        parts=parts,
        base=base,
    )


def empty_manifest(
    generation: int, token: str, *, lineage: str = LINEAGE, schema: RowSchema = SCHEMA, world_size: int = 0
) -> Manifest:
    """The manifest of a start that has trained nothing: step 0, no parts, no settings."""
    return Manifest(
        lineage=lineage,
        generation=generation,
        step=0,
        parent_checkpoint_id="",
        token=token,
        epoch=0,
        world_size=world_size,
        settings={},
        row_schema=json.loads(json.dumps(schema.to_json())),
        identity={},
    )


def three_checkpoints(path: Path) -> tuple[CheckpointFolder, list[Checkpoint], list[Model]]:
    """Steps 10, 20 and 30 of generation 1. The last builds on a full file of step 20. The last two delete rows."""
    random = np.random.default_rng(5)
    folder = CheckpointFolder(path)
    generation = folder.new_generation()
    model: Model = {}
    checkpoints, models = [], []
    base, sources = None, ()
    for step in (10, 20, 30):
        # A row has one owner: rank 0 does not write rank 1's rows.
        changes = draw_rows(random, 60)
        halves = [{key: value for key, value in changes.items() if key[1] % 2 == rank} for rank in (0, 1)]
        gone = sorted(model)[:: step // 5]
        model = {key: value for key, value in model.items() if key not in gone} | changes
        before = checkpoints[-1] if checkpoints else None
        checkpoints.append(save(folder, generation, step, halves, before=before, base=base, sources=sources, gone=gone))
        models.append(model)
        if step == 20:
            scratch = path / "full"
            scratch.mkdir()
            now = checkpoints[-1]
            base = merge_files(now.folder, now.manifest.row_files, SCHEMA, target=scratch, step=step)
            sources = (scratch,)
    return folder, checkpoints, models


def rows_of(checkpoint: Checkpoint) -> CheckpointRows:
    return CheckpointRows(checkpoint.folder, checkpoint.manifest, RowSchema.from_json(checkpoint.manifest.row_schema))


def files_of(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())
