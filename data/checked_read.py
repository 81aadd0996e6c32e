"""`read_checked`: one block of any source, without the rows whose labels, weight or time are out of range.

    source.read(block) ──> Columns ──labels in `LOSS_LABELS`?──> Columns, or InputError
                                     weight finite, at least 0?
                                     time in `TIMES`?

Such a row is malformed like any other: `data.bad_rows` says whether it stops the job or is skipped and counted.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.labels import LOSS_LABELS
from bagpipe.util.distinct_ids import distinct_ids
from data.clock import TIMES, outside_times
from data.columns import Columns, take_rows
from data.source import Block, Source

__all__ = ["read_checked"]


def read_checked(source: Source, block: Block) -> Columns:
    """Parse one block and check its labels, weights and times.

    Raises:
        InputError: a bad row under the stop policy. The row that the reader refuses comes first.
    """
    columns = source.read(block)
    outside = _bad_rows(columns, unlabelled=_is_unlabelled(source))
    if not outside.size:
        return columns
    raw_rows = np.delete(np.arange(columns.num_raw_rows), columns.bad_rows)  # of the good rows
    if source.bad_rows == "stop":
        row = int(outside[0])
        raise InputError(f"{source.locate(block, int(raw_rows[row]))}: {_reason(source, columns, row)}")
    kept = take_rows(columns, np.delete(np.arange(columns.num_rows), outside))
    return dataclasses.replace(kept, bad_rows=distinct_ids([columns.bad_rows, raw_rows[outside]]))


def _is_unlabelled(source: Source) -> bool:
    """NaN is no label, and none is needed (`data.unlabelled`). Of the readers that can do without labels."""
    return bool(getattr(source, "unlabelled", False))


def _outside(labels: NDArray[np.float32], *, unlabelled: bool) -> NDArray[np.int64]:
    found = LOSS_LABELS.outside(labels)
    return found[~np.isnan(labels.reshape(-1)[found])] if unlabelled and found.size else found


def _bad_rows(columns: Columns, *, unlabelled: bool) -> NDArray[np.int64]:
    """Ascending rows with a label outside its range, or a weight or a time that is none."""
    outside = _outside(columns.labels, unlabelled=unlabelled)
    if columns.labels.ndim > 1:
        outside = distinct_ids([outside // columns.labels.shape[1]])
    weights = columns.example_weights
    if weights is not None:
        outside = distinct_ids([outside, np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))])
    if columns.times_s is not None and (rows := outside_times(columns.times_s)).size:
        outside = distinct_ids([outside, rows])
    return outside


def _reason(source: Source, columns: Columns, row: int) -> str:
    """The fault of a bad row."""
    labels = columns.labels[row].reshape(-1)
    wrong = _outside(labels, unlabelled=_is_unlabelled(source))
    if wrong.size:
        name, label = source.schema.labels[wrong[0]], labels[wrong[0]]
        return f"expected a label in {LOSS_LABELS} in column {name!r}, got {label!s}"
    if columns.times_s is not None and (time_s := int(columns.times_s[row])) not in TIMES:
        return f"expected a time of the years 1970 to 9999, got {time_s} s since 1970"
    assert columns.example_weights is not None, "the row is bad for its label, its weight or its time"
    weight = columns.example_weights[row]
    return f"expected a finite weight of at least 0 in column {source.schema.example_weight!r}, got {weight!s}"
