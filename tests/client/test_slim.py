"""What is left off a step comes back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bagpipe.client.codec import CodecError
from bagpipe.client.slim import full, slim, values_follow
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from tests.cacher.daemons import config, planned_batches
from tests.client.rank_batches import assert_same, encode_rank_batch, example_rank_batch


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("limit", [200, 3])  # 3: ranks without examples
def test_planned_steps_come_back(world_size: int, limit: int) -> None:
    for steps in planned_batches(config(batch_size=20, limit=limit), world_size):
        for step in steps:
            for without_values in (False, True):
                assert_same(full(slim(step, without_values=without_values)), step)


def test_one_hot_steps_shrink() -> None:
    step = example_rank_batch(num_examples=100)
    small = slim(step, without_values=True)
    saved = step.batch.values.nbytes + step.batch.lengths.nbytes
    assert len(encode_rank_batch(step)) - len(encode_rank_batch(small)) == pytest.approx(saved, abs=16)


def test_bags_keep_their_lengths() -> None:
    step = example_rank_batch(num_examples=4)
    lengths = np.array([[2, 0, 1, 1]], np.int32)
    step = dataclasses.replace(step, batch=dataclasses.replace(step.batch, lengths=lengths))
    small = slim(step, without_values=True)
    assert small.batch.lengths.tolist() == [[2, 0, 1, 1]]
    assert_same(full(small), step)


@pytest.mark.parametrize(("features", "follow"), [((0, 1, 2), True), ((0, 1), False), ((0, 2, 1), False)])
def test_values_follow_where_all_features_are_read_in_order(features: tuple[int, ...], follow: bool) -> None:
    refs = tuple(FeatureRef(feature=feature, table=table) for table, feature in enumerate(features))
    spec = OracleSpec(table_rows=(1,) * len(refs), features=refs, num_slots=1, lookahead=1)
    assert values_follow(spec, 3) is follow


def test_what_does_not_fit_together_is_refused_before_it_is_allocated() -> None:
    step = slim(example_rank_batch(), without_values=True)
    for changes in (
        {"lengths": np.empty((1 << 40, 0), np.int32)},
        {"lengths": np.empty((1, 2), np.int32)},
        {"labels": np.zeros(1 << 20, np.float32)},
    ):
        with pytest.raises(CodecError, match="malformed step"):
            full(dataclasses.replace(step, batch=dataclasses.replace(step.batch, **changes)))
    beyond = dataclasses.replace(step.consumer, inverse=np.array([0, 1, 9], np.int32))
    with pytest.raises(CodecError, match="malformed step: index 9"):
        full(dataclasses.replace(step, consumer=beyond))
