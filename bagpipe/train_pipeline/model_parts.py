"""`ModelParts`: a user's model with its collections replaced, and what follows from it. Opens nothing.

model, optimizers ──check_tables──> refused, or ──schema_of, convert──> cached collections, row schema, features;
                                                                         dense optimizer; executor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from bagpipe.dense.loss_executor import LossExecutor
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.embedding.model_tables import (
    embedding_parameters,
    held_weights,
    optimizers_in_backward,
    schema_of,
    table_rows,
    tables_of,
)
from bagpipe.embedding.torchrec_collections import Converted, convert
from bagpipe.errors import InputError
from bagpipe.optim import RowOptimizers, optimizers_of
from bagpipe.train_pipeline.grad_scaler import UserScaler, user_scaler
from bagpipe.train_pipeline.model_checks import check_tables, dtype_of
from bagpipe.train_pipeline.optimizer import dense_optimizer
from bagpipe.train_pipeline.options import Options
from bagpipe.types.schema import RowSchema

__all__ = ["ModelParts", "model_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The model of a pipeline; needs no connection.

    Attributes:
        converted: the user's model, its collections replaced.
        rows: schema of its rows.
        features: names of the features that its collections look up, in the order of the planner's batches.
        optimizer: of the dense parameters.
        executor: calls the model.
        scaler: holds the loss scale; None: it is 1.
        device: of the model.
        facts: settings that a checkpoint records; JSON values.
        held: initial rows ``[num_embeddings, dim]`` by table, which the user's collections had.
    """

    converted: Converted
    rows: RowSchema
    features: tuple[str, ...]
    optimizer: Optimizer
    executor: LossExecutor
    scaler: UserScaler | None
    device: torch.device
    facts: Mapping[str, Any]
    held: Mapping[str, Tensor]


def model_parts(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    device: torch.device,
    rows: RowOptimizers | None,
    options: Options,
    grad_scaler: GradScaler | None = None,
    *,
    import_weights: bool = False,
) -> ModelParts:
    """Replace the collections of a model in place, and derive what depends on it.

    Args:
        model: the user's; `check_model` has seen it.
        optimizer: of its dense parameters, or a function that makes it.
        device: of the model.
        rows: row optimizers; None: those of optimizer-in-backward.
        options: settings.
        grad_scaler: of the loss.
        import_weights: collections on a real device give their weights as initial rows.

    Raises:
        InputError: the model or an optimizer cannot be used.
    """
    if not (isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise InputError(
            f"optimizer must be a torch.optim.Optimizer or a function that makes one, got {type(optimizer).__name__}"
        )
    scaler = user_scaler(grad_scaler)
    schema = schema_of(model)
    sizes = table_rows(model, options.unbounded)
    optimizers = rows if rows is not None else optimizers_in_backward(model)
    if not optimizers:
        raise InputError(
            "expected rows=, the row optimizer (such as bagpipe.optim.Adagrad(lr=0.02)), or embedding weights with "
            "apply_optimizer_in_backward, got neither"
        )
    names = [table.name for table in tables_of(model)]
    check_tables(model, dict(zip(names, optimizers_of(optimizers, names), strict=True)), options.row_dtype)
    held = held_weights(model)
    if held and not import_weights:
        raise InputError(
            f"tables {sorted(held)} hold weights on {next(iter(held.values())).device}, which rows in a store would "
            'not have: build the collections with device=torch.device("meta"), or pass import_weights=True to begin '
            "with these weights"
        )
    if held and options.existing == "rows-only":
        raise InputError('import_weights=True would replace the rows that existing="rows-only" trains on: choose one')
    weights = {id(parameter) for parameter in embedding_parameters(model)}
    converted = convert(
        model,
        schema,
        device=device,
        dtype=dtype_of(model),
        dense_dtype=None,
        optimizers=optimizers,
        table_rows=sizes,
        row_dtype=options.row_dtype,
        imported=held,
    )
    made = dense_optimizer(optimizer, converted.model, weights)
    precision = Precision(device_type=device.type, loss_scale=LossScale() if scaler is None else scaler.read())
    names = [table.name for table in converted.row_tables]
    return ModelParts(
        converted=converted,
        rows=converted.row_schema(seed=options.seed, rounding=options.rounding),
        features=tuple(feature.name for feature in schema.features),
        optimizer=made,
        executor=LossExecutor(converted.model, precision),
        scaler=scaler,
        device=device,
        facts={
            "rows": {name: optimizer.record for name, optimizer in zip(names, converted.optimizers, strict=True)},
            "optimizer": type(made).__name__,
            "features": [feature.name for feature in schema.features],
            "seed": options.seed,
            **({"accumulate": options.accumulate} if options.accumulate > 1 else {}),
        },
        held=held,
    )
