"""Ages of the rows of a checkpoint: the last use of each, as the job's training data says.

    checkpoint, configuration ──compare──> the data is that of the checkpoint, or InputError
    its settings ──model──> tables and features ─┐
    data, batches 0 to the checkpoint's ─────────┴──LastUses──> RowAges: of ids of a table, up to the checkpoint

The batches come from the loader of the configuration, as the job's planner gets them. They are read once, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.checkpoint.manifest import DATA_COLUMNS, Manifest
from bagpipe.client.agreement import first_difference
from bagpipe.config.sections import Config
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.jobs.job_facts import change_of_data
from bagpipe.oracle.expiry import CLOCKS, ExpiryUnit
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.last_uses import LastUses
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.schema import RowSchema
from bagpipe.util.redaction import redact
from data.clock import with_times
from data.formats import open_source
from data.loader import open_loader
from trainer.export_source import built_model
from trainer.services import data_identity
from trainer.settings import default_settings, result_settings

__all__ = ["RowAges", "ages_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowAges:
    """Ages of rows at a checkpoint.

    Attributes:
        unit: of the clock.
        now: the clock after the last batch of the checkpoint.
        uses: of all batches before the checkpoint, by tables of the model.
        tables: by number in the checkpoint's row schema: number in `uses`.
    """

    unit: ExpiryUnit
    now: float
    uses: LastUses
    tables: tuple[int, ...]

    def count_older(self, table: int, ids: NDArray[np.int64], limit: float) -> int:
        """Rows whose last use is longer ago than a limit.

        Args:
            table: number in the row schema.
            ids: int64 ``[n]``, distinct.
            limit: in units of the clock.
        """
        return int(np.count_nonzero(self.uses.ages(self.tables[table], ids, self.now) > limit))

    def is_kept(self, table: int, ids: NDArray[np.int64], limit: float) -> NDArray[np.bool_]:
        """Bool ``[n]``: the rows that do not expire now by a limit. Arguments as those of `count_older`."""
        return self.uses.is_kept(self.tables[table], ids, self.now, limit)


def ages_of(config: Config, checkpoint: Checkpoint, unit: ExpiryUnit, on_batch: Callable[[int, int], None]) -> RowAges:
    """Follow the training data up to a checkpoint.

    Args:
        config: of the job.
        checkpoint: a valid checkpoint of trained rows.
        unit: of the clock.
        on_batch: called after each batch with the number of batches so far, and of all.

    Raises:
        InputError: the data or its settings are not those of the checkpoint, it is a stream, it ends earlier, or the
            clock needs times that it does not have.
    """
    manifest = checkpoint.manifest
    if config.data.is_stream:
        raise InputError("ages of rows are followed from the first batch on, and a stream's first batches can be gone")
    _check_data(config, manifest)
    spec, tables = _tables_of(checkpoint)
    source = open_source(config.data, config.run.seed)
    if unit == "days":
        source = with_times(source, config.data.format, "--unit days")
    uses, clock, indexer = LastUses(spec.table_rows), CLOCKS[unit](), Indexer(spec)
    num_examples, latest = 0, 0.0
    with open_loader(config.data, seed=config.run.seed, source=source) as batches:
        for batch in itertools.islice(batches, manifest.step):
            latest = clock(batch)
            uses.use(indexer.index(batch).unique, latest)
            num_examples += batch.num_examples
            on_batch(uses.num_batches, manifest.step)
    if uses.num_batches < manifest.step:
        raise InputError(
            f"the data has {uses.num_batches} training batches, the checkpoint is that of step {manifest.step}"
        )
    now: Mapping[ExpiryUnit, float] = {"examples": num_examples, "steps": manifest.step, "days": latest}
    return RowAges(unit=unit, now=now[unit], uses=uses, tables=tables)


def _check_data(config: Config, manifest: Manifest) -> None:
    """Raise InputError unless the configuration reads the batches that the checkpoint was trained on."""
    identity, schema = data_identity(config)
    ours = {key: value for key, value in result_settings(config, schema).items() if _is_of_data(key)}
    known = {**default_settings(), **manifest.settings}
    theirs = {key: known[key] for key in ours if key in known}
    found = first_difference(theirs, ours, "")
    made = f"the checkpoint at step {manifest.step}"
    if found is not None:
        first, second = redact(found.first), redact(found.second)
        raise InputError(
            f"{made} was made with {found.path} {first}, this command has {second}: expected the job's configuration"
        )
    change = change_of_data(manifest, identity) if manifest.identity else None
    if change is not None:
        raise InputError(f"{made} was made with other data: {change}: expected the data of the job")


def _is_of_data(key: str) -> bool:
    return key.startswith("data.") or key in ("run.seed", DATA_COLUMNS)


def _tables_of(checkpoint: Checkpoint) -> tuple[OracleSpec, tuple[int, ...]]:
    """The tables of the checkpoint's model and their features; numbers of the row schema's tables among them."""
    settings = checkpoint.manifest.settings
    model, data = built_model(checkpoint)
    with torch.random.fork_rng(devices=()):
        converted = convert(model, data, dtype=settings["run.dtype"])
    names = [table.name for table in converted.row_tables]
    spec = OracleSpec(
        table_rows=tuple(table.rows for table in converted.row_tables),
        features=converted.features,
        num_slots=0,
        lookahead=1,
    )
    schema = RowSchema.from_json(checkpoint.manifest.row_schema)
    return spec, tuple(names.index(table.name) for table in schema.tables)
