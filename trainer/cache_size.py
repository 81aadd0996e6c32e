"""How many rows the cache of a rank holds: those of the configuration, or what memory and tables allow (auto)."""

from __future__ import annotations

import torch

from bagpipe.cache.auto_rows import auto_rows
from bagpipe.config.sections import Config
from bagpipe.embedding.torchrec_collections import Converted
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.devices import BatchSize, activation_bytes, memory_need

__all__ = ["batch_size_of", "cache_rows_of", "num_caches_of"]


def batch_size_of(config: Config, converted: Converted, data: DataSchema, world_size: int) -> BatchSize:
    """Sizes of one rank's part of a batch."""
    parameters = [*converted.model.parameters()]
    num_examples = -(-config.data.batch_size // world_size)
    return BatchSize(
        num_ids=num_examples * len(data.features),
        read_ahead=config.cache.read_ahead,
        dense_bytes=sum(parameter.nbytes for parameter in parameters),
        activation_bytes=activation_bytes(parameters, num_examples),
    )


def num_caches_of(config: Config) -> int:
    """Caches of a rank: evaluations during training have one of their own."""
    return 2 if config.eval.every else 1


def cache_rows_of(config: Config, converted: Converted, data: DataSchema, rows: RowSchema, world_size: int = 1) -> int:
    """Most rows of this rank's cache; 0: direct mode. With `cache.rows` auto of this rank: all take the fewest.

    Args:
        config: of the job.
        converted: its model.
        data: its data.
        rows: schema of its rows.
        world_size: ranks.

    Raises:
        InputError: no row fits.
    """
    if config.cache.rows != "auto":
        return config.cache.rows
    batch = batch_size_of(config, converted, data, world_size)
    return auto_rows(
        rows,
        torch.device(config.run.device),
        [table.rows for table in converted.row_tables],
        world_size=world_size,
        max_rows=config.cache.max_rows,
        other_bytes=memory_need(rows, 1, batch).other_bytes,
        num_caches=num_caches_of(config),
    )
