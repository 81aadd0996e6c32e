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
from bagpipe.cache.pooling import pooling_arrays
from bagpipe.cache.row_exchange_plan import GroupExchange, prepare_exchange
from bagpipe.cache.slots import rows_of_tables, table_rows
from bagpipe.cache.upload import SlotRows, Uploader
from bagpipe.errors import JobError
from bagpipe.kernels.segment_sum import HostSegmentSum, Int32, SegmentSum
from bagpipe.oracle.plan import ConsumerPlan, ExchangePlan, RowList
from bagpipe.types.batch import Batch

__all__ = ["BatchContext", "GroupContext", "PartContext", "PlannedRows", "Span", "prepare_batch"]

#: Start and end of consecutive entries.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRows:
    """The unique rows of one table group, on the host, for lookups of other ids than the planned ones.

    Attributes:
        rows: the rows, in plan order.
        arrival: int32 ``[U]``, position of each row among those that are looked up; None: the same order.
        pushed: by part of the backward, the rows whose gradients it sums, in its order; None: all, in plan order.
    """

    rows: RowList
    arrival: Int32 | None
    pushed: tuple[NDArray[np.int64] | None, ...]


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
        planned: the unique rows.
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
    planned: PlannedRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchContext:
    """Index tensors of one batch.

    Attributes:
        batch_index: position of the batch in its phase.
        num_examples: number of examples.
        values: int64 ``[num_occurrences]``, the ids. On a CPU the model's own input can share their memory.
        lengths: int32 ``[num_features, num_examples]``, ids per bag; as `values`.
        ids: int64 ``[num_occurrences]``, the ids on the device, to compare with those that the model passes on.
        bags: int32 ``[num_features * num_examples]``, the same of `lengths`.
        feature_starts: start of each feature's ids; and the end of all.
        groups: one context per table group of the layout.
        parts: of the micro-batches; empty: the batch is not divided.
    """

    batch_index: int
    num_examples: int
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    ids: Tensor
    bags: Tensor
    feature_starts: tuple[int, ...]
    groups: tuple[GroupContext, ...]
    parts: tuple[PartContext, ...] = ()

    @property
    def versions(self) -> tuple[int, int]:
        """Of `ids` and `bags`: a write to one of them changes its own, also by a model whose input they are."""
        return self.ids._version, self.bags._version


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
        ids=upload.kept(batch.values),
        bags=upload.kept(batch.lengths.reshape(-1)),
        feature_starts=tuple(batch.feature_offsets().tolist()),
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
    pooling = pooling_arrays(group, _lengths(group, layout, batch), inverse, order)
    segment_sum = HostSegmentSum(
        row_starts=consumer.offsets[first_row : end_row + 1] - consumer.offsets[first_row],
        sources=pooling.sources,
        coefficients=pooling.coefficients,
        occurrences=order if group.lookup.weighted else None,
    )
    local: SlotRows | None = None
    group_exchange: GroupExchange | None = None
    forward = pooling.inverse
    unique = table_rows(consumer.unique, group.first_table, group.end_table)
    if exchange is None:
        local = upload.slot_rows(unique, consumer.slots[rows])
        backward: tuple[SegmentSum, ...] = () if group.is_frozen else (upload.segment_sum(segment_sum),)
        planned = PlannedRows(rows=unique, arrival=None, pushed=(None,) * len(backward))
    else:
        prepared = prepare_exchange(group, consumer, exchange, segment_sum, upload)
        group_exchange, backward = prepared.exchange, prepared.backward
        forward, inverse = prepared.arrival[forward], prepared.arrival[inverse]
        planned = PlannedRows(rows=unique, arrival=prepared.arrival, pushed=prepared.pushed)
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
        planned=planned,
    )
    return context, inverse


def _lengths(group: TableGroup, layout: LookupLayout, batch: Batch) -> Int32:
    """int32 ``[segments of the group, examples]``: ids per bag."""
    features = [ref.feature for ref in layout.features[group.first_segment : group.end_segment]]
    return batch.lengths if features == list(range(batch.num_features)) else batch.lengths[features]


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
                ids=upload.kept(part.values),
                bags=upload.kept(part.lengths.reshape(-1)),
                feature_starts=tuple(part.feature_offsets().tolist()),
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
    lengths = _lengths(group, layout, batch)
    sizes = lengths.sum(axis=1, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes + lengths[:, :first].sum(axis=1, dtype=np.int64)
    ends = starts + lengths[:, first:end].sum(axis=1, dtype=np.int64)
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def _part_of(
    group: GroupContext, layout: LookupLayout, part: Batch, inverse: Int32, spans: Sequence[Span], upload: Uploader
) -> GroupContext:
    """A group's context for the lookups of one micro-batch."""
    mine = np.concatenate([inverse[:0], *(inverse[start:end] for start, end in spans)])
    pooling = pooling_arrays(group.tables, _lengths(group.tables, layout, part), mine, mine[:0])
    return dataclasses.replace(
        group,
        inverse=upload.tensor(pooling.inverse),
        bag_offsets=upload.optional(pooling.bag_offsets),
        backward=(),
        bag_order=upload.optional(pooling.bag_order),
        bags=upload.optional(pooling.bags),
        segment_sizes=tuple(end - start for start, end in spans),
    )
