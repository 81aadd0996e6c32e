"""`BatchContext`: index tensors of one batch, for forward and backward. Built ahead of time, in any thread.

    plan (numpy, segment after segment)                       tensors of one table group
    inverse[p]  ──per example: segment s of example b──>      inverse, bag_offsets   forward: rows -> bags
    order, offsets (CSR)  ──occurrence -> its bag──>          `SegmentSum`              backward: bags -> rows

A batch that is the concatenation of micro-batches has a context for the lookups of each. Its rows and segment sums are
those of the whole batch.

With several ranks, rows are ordered by owner, and the backward has two parts: gradients that the next batch waits for,
and the rest (`bagpipe.cache.row_exchange`).

Rule of this file: *bags are numbered example-major*, bag ``b * num_segments + s``. Occurrences are segment-major, but
the model reads ``[num_examples, num_segments * dim]``. Permuting 4-byte positions here, ahead of time, avoids
transposing the pooled vectors in every forward and their gradient in every backward
(docs/decisions/0015-orders-of-occurrences.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.lookup_layout import LookupLayout, TableGroup
from bagpipe.cache.row_exchange_plan import GroupExchange, prepare_exchange
from bagpipe.cache.slots import rows_of_tables, table_rows
from bagpipe.cache.upload import SlotRows, Uploader
from bagpipe.errors import JobError
from bagpipe.kernels.segment_sum import HostSegmentSum, Int32, SegmentSum
from bagpipe.oracle.plan import ConsumerPlan, ExchangePlan
from bagpipe.types.batch import Batch

__all__ = ["BatchContext", "GroupContext", "PartContext", "Span", "prepare_batch"]

#: Start and end of consecutive entries.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupContext:
    """Index tensors of one table group, on its device; n occurrences, U unique rows, G gradient rows.

    A gradient row is a bag (G = num_examples * num_segments) or, without pooling, an occurrence (G = n).

    Attributes:
        tables: the group's tables and segments.
        num_rows: U.
        local: the unique rows in this rank's cache; None with several ranks.
        exchange: exchange of rows and gradients with the owners; None with one rank.
        inverse: int32 ``[n]``, unique row of each occurrence: bag by bag, or in plan order without pooling.
        bag_offsets: int32 ``[G + 1]``, start of each bag in `inverse`; None if every bag holds exactly one id, and
            without pooling.
        backward: segment sums from gradient rows to unique rows: one, or two (now, later) with several ranks; none
            with one rank and frozen tables.
        bag_order: int32 ``[n]``, plan position of each entry of `inverse`; weighted groups only.
        bags: int32 ``[n]``, bag of each entry of `inverse`; weighted groups only.
        segment_sizes: number of occurrences of each segment.
    """

    tables: TableGroup
    num_rows: int
    local: SlotRows | None
    exchange: GroupExchange | None
    inverse: Tensor
    bag_offsets: Tensor | None
    backward: tuple[SegmentSum, ...]
    bag_order: Tensor | None
    bags: Tensor | None
    segment_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchContext:
    """Index tensors of one batch.

    Attributes:
        batch_index: position of the batch in its phase.
        num_examples: number of examples.
        values: int64 ``[num_occurrences]``, the ids, to check that the model passes them on unchanged.
        lengths: int32 ``[num_features, num_examples]``, ids per bag.
        feature_sizes: number of ids of each feature.
        groups: one context per table group of the layout.
        parts: of the micro-batches; empty: the batch is not divided.
    """

    batch_index: int
    num_examples: int
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    feature_sizes: tuple[int, ...]
    groups: tuple[GroupContext, ...]
    parts: tuple[PartContext, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartContext:
    """One micro-batch of a batch.

    Attributes:
        context: of its lookups. Its groups have the rows of the whole batch, and no segment sums.
        gradient_rows: by table group, where its gradient rows are among those of the whole batch, in their order.
        occurrences: by table group, the same of its occurrences in plan order.
    """

    context: BatchContext
    gradient_rows: tuple[tuple[Span, ...], ...]
    occurrences: tuple[tuple[Span, ...], ...]


def prepare_batch(
    layout: LookupLayout,
    batch: Batch,
    consumer: ConsumerPlan,
    exchange: ExchangePlan | None = None,
    *,
    upload: Uploader,
) -> BatchContext:
    """Turn the plan of one batch into index tensors.

    Args:
        layout: the model's table groups.
        batch: the rank's examples.
        consumer: the plan of the rows they read.
        exchange: the plan of the exchange with other ranks; None with one rank.
        upload: makes the tensors; they are valid once its batch ends.

    Raises:
        JobError: plan and batch differ in their number of occurrences.
    """
    sizes = batch.lengths.sum(axis=1, dtype=np.int64)
    ends = np.zeros(len(layout.features) + 1, dtype=np.int64)
    np.cumsum(sizes[[ref.feature for ref in layout.features]], out=ends[1:])
    if ends[-1] != len(consumer.order):
        raise JobError(
            f"batch {batch.index}: the plan has {len(consumer.order)} id occurrences, the batch has {ends[-1]}"
        )
    inverse = consumer.inverse
    made = [_group_context(group, layout, batch, consumer, inverse, exchange, ends, upload) for group in layout.groups]
    groups = tuple(group for group, _ in made)
    return BatchContext(
        batch_index=batch.index,
        num_examples=batch.num_examples,
        values=batch.values,
        lengths=batch.lengths,
        feature_sizes=tuple(sizes.tolist()),
        groups=groups,
        parts=tuple(_part_contexts(layout, batch, groups, [rows for _, rows in made], upload)),
    )


def _group_context(
    group: TableGroup,
    layout: LookupLayout,
    batch: Batch,
    consumer: ConsumerPlan,
    inverse_of_all: Int32,
    exchange: ExchangePlan | None,
    ends: NDArray[np.int64],
    upload: Uploader,
) -> tuple[GroupContext, Int32]:
    """The context of one group, and the row that each occurrence in plan order reads.

    Indices are relative to the group's first row and first occurrence. `inverse_of_all`: of the consumer.
    """
    rows = rows_of_tables(consumer.unique, group.first_table, group.end_table)
    first_row, end_row = rows.start, rows.stop
    first, end = int(ends[group.first_segment]), int(ends[group.end_segment])
    inverse = inverse_of_all[first:end] - np.int32(first_row)
    order = consumer.order[first:end] - np.int32(first)
    pooling = _pooling(group, layout, batch, inverse, order)
    segment_sum = HostSegmentSum(
        row_starts=consumer.offsets[first_row : end_row + 1] - consumer.offsets[first_row],
        sources=pooling.sources,
        coefficients=pooling.coefficients,
        occurrences=order if group.lookup.weighted else None,
    )
    local: SlotRows | None = None
    group_exchange: GroupExchange | None = None
    forward = pooling.inverse
    if exchange is None:
        local = upload.slot_rows(table_rows(consumer.unique, group.first_table, group.end_table), consumer.slots[rows])
        backward: tuple[SegmentSum, ...] = () if group.is_frozen else (upload.segment_sum(segment_sum),)
    else:
        prepared = prepare_exchange(group, consumer, exchange, segment_sum, upload)
        group_exchange, backward = prepared.exchange, prepared.backward
        forward, inverse = prepared.arrival[forward], prepared.arrival[inverse]
    context = GroupContext(
        tables=group,
        num_rows=end_row - first_row,
        local=local,
        exchange=group_exchange,
        inverse=upload.tensor(forward),
        bag_offsets=upload.optional(pooling.bag_offsets),
        backward=backward,
        bag_order=upload.optional(pooling.bag_order),
        bags=upload.optional(pooling.bags),
        segment_sizes=tuple(np.diff(ends[group.first_segment : group.end_segment + 1]).tolist()),
    )
    return context, inverse


def _part_contexts(
    layout: LookupLayout, batch: Batch, groups: Sequence[GroupContext], inverses: Sequence[Int32], upload: Uploader
) -> Iterator[PartContext]:
    """The contexts of a batch's micro-batches. `inverses`: by group, the row of each occurrence in plan order."""
    bounds = np.cumsum([0, *(part.num_examples for part in batch.parts)]).tolist()
    for part, (first, end) in zip(batch.parts, pairwise(bounds), strict=True):
        occurrences = [_spans(group.tables, layout, batch, first, end) for group in groups]
        contexts = tuple(
            _part_of(group, layout, part, inverse, spans, upload)
            for group, inverse, spans in zip(groups, inverses, occurrences, strict=True)
        )
        yield PartContext(
            context=BatchContext(
                batch_index=batch.index,
                num_examples=part.num_examples,
                values=part.values,
                lengths=part.lengths,
                feature_sizes=tuple(part.lengths.sum(axis=1, dtype=np.int64).tolist()),
                groups=contexts,
            ),
            gradient_rows=tuple(
                spans
                if group.tables.lookup.pooling == "none"
                else ((first * group.tables.num_segments, end * group.tables.num_segments),)
                for group, spans in zip(groups, occurrences, strict=True)
            ),
            occurrences=tuple(occurrences),
        )


def _spans(group: TableGroup, layout: LookupLayout, batch: Batch, first: int, end: int) -> tuple[Span, ...]:
    """Occurrences of some examples in a group, segment by segment, relative to the group's first one."""
    lengths = batch.lengths[[ref.feature for ref in layout.features[group.first_segment : group.end_segment]]]
    sizes = lengths.sum(axis=1, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes + lengths[:, :first].sum(axis=1, dtype=np.int64)
    ends = starts + lengths[:, first:end].sum(axis=1, dtype=np.int64)
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def _part_of(
    group: GroupContext, layout: LookupLayout, part: Batch, inverse: Int32, spans: Sequence[Span], upload: Uploader
) -> GroupContext:
    """A group's context for the lookups of one micro-batch."""
    mine = np.concatenate([inverse[:0], *(inverse[start:end] for start, end in spans)])
    pooling = _pooling(group.tables, layout, part, mine, mine[:0])
    return dataclasses.replace(
        group,
        inverse=upload.tensor(pooling.inverse),
        bag_offsets=upload.optional(pooling.bag_offsets),
        backward=(),
        bag_order=upload.optional(pooling.bag_order),
        bags=upload.optional(pooling.bags),
        segment_sizes=tuple(end - start for start, end in spans),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pooling:
    """Host arrays of `GroupContext` that depend on the pooling."""

    inverse: Int32
    sources: Int32
    bag_offsets: Int32 | None = None
    coefficients: NDArray[np.float64] | None = None
    bag_order: Int32 | None = None
    bags: Int32 | None = None


def _pooling(group: TableGroup, layout: LookupLayout, batch: Batch, inverse: Int32, order: Int32) -> _Pooling:
    if group.lookup.pooling == "none":
        return _Pooling(inverse=inverse, sources=order)
    num_segments, num_examples = group.num_segments, batch.num_examples
    features = [ref.feature for ref in layout.features[group.first_segment : group.end_segment]]
    lengths = batch.lengths if features == list(range(batch.num_features)) else batch.lengths[features]
    num_bags = num_segments * num_examples
    bag_numbers = np.arange(num_bags, dtype=np.int32).reshape(num_examples, num_segments).T  # [segment, example]
    one_hot = len(inverse) == num_bags and bool((lengths == 1).all())
    if one_hot:
        # Occurrence p belongs to segment p // num_examples and example p % num_examples: a plain transposition.
        bag_of = np.ascontiguousarray(bag_numbers).reshape(-1)
        permuted = np.ascontiguousarray(inverse.reshape(num_segments, num_examples).T).reshape(-1)
        bag_offsets = bag_order = bags = None
        if group.lookup.weighted:
            bags = np.arange(num_bags, dtype=np.int32)
            bag_offsets = np.arange(num_bags + 1, dtype=np.int32)
            bag_order = np.arange(num_bags, dtype=np.int32).reshape(num_segments, num_examples).T.reshape(-1)
        return _Pooling(
            inverse=permuted, sources=bag_of[order], bag_offsets=bag_offsets, bag_order=bag_order, bags=bags
        )
    return _multi_hot(group, lengths, bag_numbers, inverse, order)


def _multi_hot(group: TableGroup, lengths: Int32, bag_numbers: Int32, inverse: Int32, order: Int32) -> _Pooling:
    """Permute bags of any length from segment-major to example-major order."""
    segment_lengths = lengths.reshape(-1)
    bag_of = np.repeat(bag_numbers.reshape(-1), segment_lengths)
    starts = np.zeros(len(segment_lengths) + 1, dtype=np.int32)
    np.cumsum(segment_lengths, out=starts[1:])
    bag_lengths = np.ascontiguousarray(lengths.T).reshape(-1)
    bag_offsets = np.zeros(len(bag_lengths) + 1, dtype=np.int32)
    np.cumsum(bag_lengths, out=bag_offsets[1:])
    # Entry i of the permuted order is occurrence i - bag_offsets[bag] of its bag.
    shifts = starts[:-1].reshape(lengths.shape).T.reshape(-1) - bag_offsets[:-1]
    bag_order = np.repeat(shifts, bag_lengths)
    bag_order += np.arange(len(inverse), dtype=np.int32)
    coefficients = None
    if group.lookup.pooling == "mean":
        with np.errstate(divide="ignore"):  # no occurrence uses the coefficient of an empty bag
            coefficients = np.repeat(1.0 / segment_lengths, segment_lengths)[order]
    weighted = group.lookup.weighted
    return _Pooling(
        inverse=inverse[bag_order],
        sources=bag_of[order],
        bag_offsets=bag_offsets,
        coefficients=coefficients,
        bag_order=bag_order if weighted else None,
        bags=np.repeat(np.arange(len(bag_lengths), dtype=np.int32), bag_lengths) if weighted else None,
    )
