"""`check_model`: calls a user's model on a tiny batch, before the job opens a store or trains.

    two examples, id 0 in every feature ──plan, rows of a small cache──> model(dense, sparse) ──> are these logits?

Nothing of the call remains: torch's generators and the model's buffers and mode are as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.checkpoint.dense_state import type_name
from bagpipe.embedding.torchrec_collections import Converted
from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.inputs import InputMaker

__all__ = ["NUM_EXAMPLES", "check_expiring_tables", "check_loss_weights", "check_model"]

NUM_EXAMPLES = 2


def check_model(converted: Converted, schema: DataSchema, rows: RowSchema, device: torch.device, name: str) -> int:
    """Check that the model returns logits, and with several labels one of each.

    An error of the model itself gets a note that says when it was called.

    Args:
        converted: the model; it is bound to a cache of the check afterwards.
        schema: columns of the data.
        rows: row schema of the job.
        device: of the model.
        name: what messages call the model: its ``module:function``.

    Returns:
        The number of logits.

    Raises:
        InputError: the model returns something else than ``[num_examples]``, ``[num_examples, 1]`` or a tuple of such.
    """
    batch = _batch(schema)
    spec = OracleSpec(
        table_rows=tuple(table.rows for table in converted.row_tables),
        features=converted.features,
        num_slots=len(converted.row_tables),
        lookahead=1,
    )
    ((_, plan),) = plan_batches([batch], spec)
    rank_batch = RankBatch.of(batch, plan, 0)
    cache = RowCache(rows, spec.slots_per_rank, device)
    converted.bind(cache)
    cache.insert(rank_batch.owner, FetchRequests.of(rank_batch.owner, skip_new=True), [])
    with cache.uploads(1).batch() as upload:
        context = prepare_batch(converted.layout, batch, rank_batch.consumer, upload=upload)
        inputs = InputMaker(schema)(batch, upload)
    assert inputs is not None, "the batch has examples"
    cache.begin(context)
    with _unchanged(converted.model, device), torch.no_grad():
        try:
            outputs = converted.model(inputs.dense, inputs.sparse)
        except Exception as error:
            error.add_note(f"model.factory {name}: called on a batch of {NUM_EXAMPLES} examples before training")
            raise
    cache.end(context)
    return _check_logits(outputs, name, schema.labels)


def check_loss_weights(weights: Sequence[float], num_logits: int) -> None:
    """Raise InputError unless there is one weight for each of the model's logits, or none at all."""
    if weights and len(weights) != num_logits:
        shown = ",".join(f"{weight:g}" for weight in weights)
        raise InputError(f"model.loss_weights must be {num_logits} numbers, one for each logit, got {shown}")


def _batch(schema: DataSchema) -> Batch:
    num_ids = NUM_EXAMPLES * len(schema.features)
    return Batch(
        index=0,
        dense=np.zeros((NUM_EXAMPLES, len(schema.dense)), np.float32),
        values=np.zeros(num_ids, np.int64),
        lengths=np.ones((len(schema.features), NUM_EXAMPLES), np.int32),
        labels=np.zeros(NUM_EXAMPLES if len(schema.labels) == 1 else (NUM_EXAMPLES, len(schema.labels)), np.float32),
        weights=np.ones(num_ids, np.float32) if any(feature.weighted for feature in schema.features) else None,
    )


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode; generators, buffers and modes are restored."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for buffer, before in buffers:
                buffer.copy_(before)


def _check_logits(outputs: object, name: str, labels: Sequence[str]) -> int:
    """The number of logits."""
    heads = outputs if isinstance(outputs, (tuple, list)) and outputs else [outputs]
    shapes = ([NUM_EXAMPLES], [NUM_EXAMPLES, 1])
    if all(isinstance(head, Tensor) and head.is_floating_point() and list(head.shape) in shapes for head in heads):
        if len(labels) in (1, len(heads)):
            return len(heads)
        raise InputError(
            f"model.factory {name}: expected a tuple of {len(labels)} logits, of the labels {', '.join(labels)}, "
            f"got {len(heads)}"
        )
    found = ", ".join(_words(head) for head in heads)
    if heads is outputs:
        found = f"a {type(outputs).__name__} of {found}"
    raise InputError(
        f"model.factory {name}: expected one logit for each example, a floating-point tensor [num_examples] or "
        f"[num_examples, 1], or a tuple of such; got {found} for {NUM_EXAMPLES} examples"
    )


def _words(value: object) -> str:
    return type_name(value) if isinstance(value, Tensor) else type(value).__name__


def check_expiring_tables(converted: Converted, schema: DataSchema) -> None:
    """Check that each table of a model sees all uses of its rows, if rows of the data expire.

    Raises:
        InputError: a table reads features of several tables of the data, or leaves some of its table out.
    """
    names, tables = [feature.name for feature in schema.features], [feature.table for feature in schema.features]
    for number, table in enumerate(converted.row_tables):
        read = {ref.feature for ref in converted.features if ref.table == number}
        of_data = {tables[feature] for feature in read}
        whole = {feature for feature, name in enumerate(tables) if name in of_data}
        if len(of_data) > 1 or read != whole:
            got, expected = (", ".join(names[n] for n in sorted(features)) for features in (read, whole))
            raise InputError(
                f"table {table.name!r}: with data.expire_after expected all features of one table of the data, got "
                f"{got} of {expected} (tables {', '.join(sorted(of_data))})"
            )
