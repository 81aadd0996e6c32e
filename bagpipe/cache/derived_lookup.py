"""`derived_context`: index tensors of a lookup whose ids are not the planned ones, but rows of the same batch.

    ids of a model's own making ──which rows of the batch?──> inverse ──as for a plan──> `GroupContext`

A model that shuffles the items of its batch, repeats some or drops others looks up rows that are there already. The
lookup gets bags, and segment sums to the same rows, of its own. It is made in the model's forward: one sort of its ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.batch_context import GroupContext
from bagpipe.cache.pooling import pooling_arrays
from bagpipe.cache.upload import Uploader
from bagpipe.errors import InputError
from bagpipe.kernels.segment_sum import HostSegmentSum, Int32

__all__ = ["ONLY_OWN_IDS", "derived_context"]

#: Rule of all lookups, for errors.
ONLY_OWN_IDS = (
    "rows are fetched before the model runs, so a collection can look up ids of its batch only (hash them in the data "
    "schema, not in the model)"
)


def derived_context(
    group: GroupContext,
    tables: Sequence[int],
    names: Sequence[str],
    ids: Sequence[NDArray[np.int64]],
    lengths: Int32,
    upload: Uploader,
) -> GroupContext:
    """The context of a derived lookup of a table group.

    Args:
        group: context of the planned lookup.
        tables: table number of each segment of the group.
        names: name of the feature of each segment, for errors.
        ids: int64 ``[n]`` each, ids of each segment.
        lengths: int32 ``[segments, examples]``, ids per bag.
        upload: makes the tensors, which are valid at once.

    Raises:
        InputError: an id is none of the batch's rows.
    """
    found = [_rows_of(group, table, name, own) for table, name, own in zip(tables, names, ids, strict=True)]
    inverse = np.concatenate([np.empty(0, np.int32), *found])
    order = _by_row(inverse)
    pooling = pooling_arrays(group.tables, lengths, inverse, order)
    row_starts = np.zeros(group.num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(inverse, minlength=group.num_rows), out=row_starts[1:])
    sums = HostSegmentSum(
        row_starts=row_starts,
        sources=pooling.sources,
        coefficients=pooling.coefficients,
        occurrences=order if group.tables.lookup.weighted else None,
    )
    arrival = group.planned.arrival
    return dataclasses.replace(
        group,
        inverse=upload.tensor(pooling.inverse if arrival is None else arrival[pooling.inverse]),
        bag_offsets=upload.optional(pooling.bag_offsets),
        backward=tuple(
            upload.segment_sum(sums if rows is None else sums.select(rows)) for rows in group.planned.pushed
        ),
        bag_order=upload.optional(pooling.bag_order),
        bags=upload.optional(pooling.bags),
        segment_sizes=tuple(map(len, ids)),
    )


def _rows_of(group: GroupContext, table: int, name: str, ids: NDArray[np.int64]) -> Int32:
    """int32 ``[n]``, number of each id's row in the group, in plan order."""
    first, end = group.planned.rows.table_offsets[table : table + 2].tolist()
    own = group.planned.rows.ids[first:end]
    by_id = np.argsort(own)  # plans order ids as unsigned numbers
    places = by_id.take(np.searchsorted(own, ids, sorter=by_id), mode="clip") if len(own) else np.zeros_like(ids)
    is_other = own.take(places) != ids if len(own) else np.ones(len(ids), np.bool_)
    if is_other.any():
        raise InputError(
            f"embedding input has id {ids[np.argmax(is_other)]} for feature {name!r}, which is none of the batch's "
            f"{len(own)} ids of its table: {ONLY_OWN_IDS}"
        )
    rows: Int32 = (places + first).astype(np.int32)
    return rows


def _by_row(inverse: Int32) -> Int32:
    """Occurrences grouped by row, ascending within a row: one sort of packed words."""
    words = inverse.astype(np.int64) << 32
    words |= np.arange(len(inverse), dtype=np.int64)
    words.sort()
    order: Int32 = (words & 0xFFFFFFFF).astype(np.int32)
    return order
