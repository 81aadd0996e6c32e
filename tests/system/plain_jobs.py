"""The plain loop of `tests.system.reference` on the data and initial values of a configured job."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bagpipe.config.sections import Config
from bagpipe.kernels.initialization import initial_weights
from bagpipe.oracle.rank_batch import Phase
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema
from data.formats import open_source
from data.loader import open_loader
from tests.system.reference import PlainBatch, PlainTable, Trained, plain_training
from trainer.assembly import BuiltModel, build_training_model

__all__ = ["all_batches", "plain_batch", "plain_job", "plain_scores", "plain_tables"]


def all_batches(config: Config, phase: Phase = "train") -> list[Batch]:
    """Every batch of a phase, as read by the cacher."""
    with open_loader(config.data, seed=config.run.seed, phase=phase) as loader:
        return list(loader)


def plain_batch(batch: Batch, schema: DataSchema) -> PlainBatch:
    """A batch split by feature."""
    offsets = batch.feature_offsets()
    bags = {}
    for number, feature in enumerate(schema.features):
        part = slice(offsets[number], offsets[number + 1])
        weights = batch.weights[part] if feature.weighted and batch.weights is not None else None
        bags[feature.name] = (batch.values[part], batch.lengths[number], weights)
    return PlainBatch(dense=torch.from_numpy(batch.dense), labels=torch.from_numpy(batch.targets), bags=bags)


def plain_tables(built: BuiltModel, batches: list[PlainBatch], dtype: str) -> list[PlainTable]:
    """The model's tables over the ids that occur."""
    tables = []
    names = [feature.name for feature in built.data.features]
    layout = built.converted.layout
    for number, table in enumerate(built.rows.tables):
        features = [names[ref.feature] for ref in layout.features if ref.table == number]
        (group,) = [group for group in layout.groups if group.first_table <= number < group.end_table]
        ids = np.unique(np.concatenate([batch.bags[name][0] for batch in batches for name in features]))
        tables.append(
            PlainTable(
                name=table.name,
                features=tuple(features),
                pooling=group.lookup.pooling,
                weighted=group.lookup.weighted,
                ids=ids,
                weights=initial_weights(table, ids, seed=built.rows.seed, dtype=dtype),
            )
        )
    return sorted(tables, key=lambda table: names.index(table.features[0]))  # in the order the model reads them


def plain_job(config: Config, **more: Any) -> Trained:
    """The plain loop over the training batches; `more`: as in `plain_training`. Its tables include held-out ids."""
    built = build_training_model(config, open_source(config.data, config.run.seed).schema)
    batches = [plain_batch(batch, built.data) for batch in all_batches(config)]
    held_out = [plain_batch(batch, built.data) for batch in all_batches(config, "eval")]
    model = config.model
    return plain_training(
        "factory" if model.factory else model.name,
        plain_tables(built, [*batches, *held_out], config.run.dtype),
        batches,
        dict(built.converted.model.named_parameters()),
        dim=model.embedding_dim,
        bottom=model.bottom_mlp,
        top=model.top_mlp,
        rows=config.optim.rows,
        rows_lr=config.optim.rows_lr,
        dense=config.optim.dense,
        dense_lr=config.optim.dense_lr,
        eps=config.optim.eps,
        **more,
    )


def plain_scores(trained: Trained, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels of the held-out examples."""
    schema = open_source(config.data, config.run.seed).schema
    logits, labels = [], []
    with torch.no_grad():
        for batch in all_batches(config, "eval"):
            trained.tables.batch = plain_batch(batch, schema)
            dense = trained.tables.batch.dense.to(trained.tables.tables[0].weights.dtype)
            logits.append(trained.model(dense, None).reshape(-1))
            labels.append(trained.tables.batch.labels)
    return torch.cat(logits), torch.cat(labels)
