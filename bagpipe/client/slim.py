"""What of a step need not travel, because it follows from the rest. Pure.

    slim: lengths that are all 1 ─> [num_features, 0]        values ─> [0], where they are the unique rows' ids
    full: the inverse; both are no-ops on a step that has everything

Of a step of one-hot features that is two fifths of the bytes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bagpipe.client.codec import CodecError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch

__all__ = ["full", "slim", "values_follow"]


def values_follow(spec: OracleSpec, num_features: int) -> bool:
    """Whether ``unique.ids[inverse]`` is a batch's `values`: a plan reads every feature, in the batch's order."""
    return [ref.feature for ref in spec.features] == list(range(num_features))


def slim(step: RankBatch, *, without_values: bool) -> RankBatch:
    """The step without what `full` puts back; `without_values` if `values_follow`."""
    batch = step.batch
    lengths, values = batch.lengths, batch.values
    if lengths.size == values.size and lengths.size and int(lengths.min()) == 1:
        lengths = lengths[:, :0]
    if without_values:
        values = values[:0]
    return dataclasses.replace(step, batch=dataclasses.replace(batch, lengths=lengths, values=values))


def full(step: RankBatch) -> RankBatch:
    """The whole step.

    Raises:
        CodecError: what is there does not fit together.
    """
    batch, consumer = step.batch, step.consumer
    lengths, values = batch.lengths, batch.values
    if not values.size and consumer.inverse.size:
        try:
            values = consumer.unique.ids[consumer.inverse]
        except IndexError as error:
            raise CodecError(f"malformed step: {error}") from None
    if lengths.shape[1] != batch.num_examples:
        shape = (lengths.shape[0], batch.num_examples)
        if lengths.size or shape[0] * shape[1] != values.size:  # before anything of that size is allocated
            raise CodecError(
                f"malformed step: {lengths.shape} lengths, {batch.num_examples} examples, {values.size} ids"
            )
        lengths = np.ones(shape, np.int32)
    if lengths is batch.lengths and values is batch.values:
        return step
    return dataclasses.replace(step, batch=dataclasses.replace(batch, lengths=lengths, values=values))
