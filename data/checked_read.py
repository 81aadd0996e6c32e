"""`read_checked`: one block of any source, without the rows whose label the loss is not defined for.

    source.read(block) ──> Columns ──labels in `LOSS_LABELS`?──> Columns, or InputError with file and row

Such a row is malformed like any other: `data.bad_rows` says whether it stops the job or is skipped and counted.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bagpipe.errors import InputError
from bagpipe.types.labels import LOSS_LABELS
from data.columns import Columns, take_rows
from data.source import Block, Source

__all__ = ["read_checked"]


def read_checked(source: Source, block: Block) -> Columns:
    """Parse one block and check its labels.

    Raises:
        InputError: a bad row under the stop policy. The row that the reader refuses comes first.
    """
    columns = source.read(block)
    outside = LOSS_LABELS.outside(columns.labels)
    if not outside.size:
        return columns
    raw_rows = np.delete(np.arange(columns.num_raw_rows), columns.bad_rows)  # of the good rows
    if source.bad_rows == "stop":
        label = columns.labels[outside[0]]
        raise InputError(
            f"{source.locate(block, int(raw_rows[outside[0]]))}: expected a label in {LOSS_LABELS} in column "
            f"{source.schema.label!r}, got {label!s}"
        )
    kept = take_rows(columns, np.delete(np.arange(columns.num_rows), outside))
    return dataclasses.replace(kept, bad_rows=np.union1d(columns.bad_rows, raw_rows[outside]))
