"""Held-out batches that are kept, and those that are asked for again."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from tests.client.rank_batches import assert_same, example_rank_batch
from trainer.held_out import HeldOutBatches

SPEC = OracleSpec(table_rows=(1,), features=(), num_slots=1, lookahead=1)


class Source:
    """Three batches, in place of a cacher's; notes what is asked for."""

    def __init__(self, error: InputError | None = None) -> None:
        self.asked: list[int] = []
        self.batch = example_rank_batch()
        self._error = error

    def batches(self, phase: str, spec: OracleSpec, *, max_steps: int = 0) -> Generator[RankBatch, None, None]:
        self.asked.append(max_steps)
        return self._make(max_steps or 3)

    def _make(self, count: int) -> Generator[RankBatch, None, None]:
        yield from [self.batch] * count
        if self._error is not None:
            raise self._error

    def skipped_rows(self) -> int:
        return 5 * len(self.asked)


def passes(source: Any, kinds: list[bool], agree: bool = True, **more: Any) -> list[list[RankBatch]]:
    """The batches of evaluations during training and after it."""
    held_out, found = HeldOutBatches(source, SPEC, **more), []
    for in_training in kinds:
        held_out.prepare()
        found.append(list(held_out.batches(in_training=in_training)))
        if in_training:
            held_out.settle(lambda can: can and agree)
    return found


@pytest.mark.parametrize(
    ("more", "agree", "kinds", "asked"),
    [
        ({}, True, [True, True, True, False], [0]),
        ({}, False, [True, True, False], [0, 0, 0]),  # another rank cannot keep them
        ({"kept_bytes": 100}, True, [True, True], [0, 0]),
        ({"max_steps": 2}, True, [True, True, False], [2, 0]),
        ({"max_steps": 2, "kept_bytes": 0}, True, [True, False], [2, 2, 0]),
    ],
)
def test_few_batches_are_kept(more: dict[str, int], agree: bool, kinds: list[bool], asked: list[int]) -> None:
    source = Source()
    found = passes(source, kinds, agree, **more)
    assert source.asked == asked
    for in_training, batches in zip(kinds, found, strict=True):
        assert len(batches) == (more.get("max_steps", 3) if in_training else 3)
        for batch in batches:
            assert_same(batch, source.batch)


def test_a_model_that_changes_its_ids_changes_no_other_evaluation() -> None:
    source = Source()
    held_out = HeldOutBatches(source, SPEC)  # type: ignore[arg-type]
    expected = source.batch.batch.values.copy()
    for _ in range(3):
        for batch in held_out.batches(in_training=True):
            assert np.array_equal(batch.batch.values, expected)
            batch.batch.values.fill(-1)
            batch.batch.lengths.fill(0)
        held_out.settle(lambda can: can)
    assert source.asked == [0]


def test_batches_before_an_error_are_not_kept() -> None:
    held_out = HeldOutBatches(Source(InputError("bad")), SPEC)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(InputError, match="bad"):
            list(held_out.batches(in_training=True))
        held_out.settle(lambda can: can)
