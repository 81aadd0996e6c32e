"""The tensors of parts that a new job takes over."""

from __future__ import annotations

import torch

from bagpipe.checkpoint.dense_state import DenseState
from bagpipe.start_from.job_plan import EARLIER_ROWS, JobPlan, part_tensors

THEIRS = DenseState(
    tensors={
        name: torch.tensor(number)
        for number, name in enumerate(
            (
                "model.kfac.weight", "rng.cpu", "part.kfac.l.next_turn", "part.average.w",
                "part.earlier_rows.1.X_UPDATE.0.ids", "part.earlier_rows.1.X_UPDATE.2.weights",
            )
        )
    }
)  # fmt: skip


def test_parts_are_taken_whole_and_tables_by_their_new_numbers() -> None:
    assert dict(part_tensors(JobPlan(), THEIRS)) == {}
    assert dict(part_tensors(JobPlan(parts=frozenset({"kfac"})), THEIRS)) == {"part.kfac.l.next_turn": torch.tensor(2)}
    rows = JobPlan(parts=frozenset({EARLIER_ROWS}), table_numbers={2: 5})
    assert dict(part_tensors(rows, THEIRS)) == {"part.earlier_rows.1.X_UPDATE.5.weights": torch.tensor(5)}
