from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bagpipe.oracle.plan import RowList


def test_records_are_frozen_and_rows_have_a_length() -> None:
    rows = RowList(table_offsets=np.array([0, 2]), ids=np.array([4, 9]))
    assert len(rows) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.ids = np.array([1])  # type: ignore[misc]
