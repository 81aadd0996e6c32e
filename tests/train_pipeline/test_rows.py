"""Rows read in Python: trained ones from the store, others with their initial values."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.kernels.initialization import initial_weights
from bagpipe.types.schema import RowTable
from tests.train_pipeline.small import DIM, ROWS, batches, pipeline, progress_all

TABLE = RowTable(name="t_f1", dim=DIM, rows=ROWS, init_bound=(1 / ROWS) ** 0.5)


def test_rows_are_initial_until_they_are_trained() -> None:
    with pipeline() as trained:
        rows, initial = trained.rows("t_f1"), initial_weights(TABLE, np.arange(ROWS), seed=0)
        assert torch.equal(rows[torch.arange(ROWS)], initial)
        assert len(rows) == 0
        progress_all(trained, iter(batches(2)))
        used = torch.unique(torch.cat([batch["ids"]["f1"].values() for batch in batches(2)]))
        assert torch.equal(rows.ids(), used)
        assert len(rows) == len(used)
        values = rows[torch.arange(ROWS)]
        untouched = torch.tensor([i not in used for i in range(ROWS)])
        assert torch.equal(values[untouched], initial[untouched])
        assert not bool((values[~untouched] == initial[~untouched]).all(1).any())


def test_rows_are_read_in_any_order_and_in_chunks() -> None:
    with pipeline() as trained:
        progress_all(trained, iter(batches(2)))
        rows = trained.rows("t_f0")
        assert torch.equal(rows[[3, 1, 3]], rows[torch.arange(ROWS)][[3, 1, 3]])
        assert rows[[]].shape == (0, DIM)
        assert torch.equal(rows[3:9:2], rows[[3, 5, 7]])
        assert torch.equal(rows[4], rows[[4]][0])
        ids, weights = zip(*rows, strict=True)
        assert torch.equal(torch.cat(ids), rows.ids())
        assert torch.equal(torch.cat(weights), rows[rows.ids()])


@pytest.mark.parametrize("call", ["train", "evaluate", "rows"])
def test_what_a_pipeline_gives_keeps_it(call: str) -> None:
    def given() -> Any:
        trained = pipeline()
        progress_all(trained, iter(batches(2)))
        return trained.rows("t_f0") if call == "rows" else getattr(trained, call)(batches(2))

    held = given()
    gc.collect()
    found = [*held]
    if call == "rows":
        with pipeline() as other:
            progress_all(other, iter(batches(2)))
            assert torch.equal(found[0][1], other.rows("t_f0")[found[0][0]])
    else:
        assert len(found) == 2


def test_other_tables_and_ids_are_refused() -> None:
    with pipeline() as trained:
        with pytest.raises(InputError, match="expected one of the tables"):
            trained.rows("f0")
        with pytest.raises(InputError, match=r"expected ids in \[0, 60\), got 1 to 60"):
            trained.rows("t_f0")[[1, ROWS]]
        with pytest.raises(InputError, match=r"must be integers, got torch\.float32"):
            trained.rows("t_f0")[torch.zeros(2)]
