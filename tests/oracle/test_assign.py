from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.batch import Batch
from bagpipe.oracle.assign import ASSIGNERS, Locality, share_sizes
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.split import split
from tests.oracle.batches import make_batch, traces


def spec_of(world_size: int) -> OracleSpec:
    return OracleSpec(
        table_rows=(None,),
        features=(FeatureRef(feature=0, table=0),),
        num_slots=1000,
        lookahead=2,
        world_size=world_size,
        assign="locality",
    )


def assigned(spec: OracleSpec, batches: list[Batch]) -> list[list[int]]:
    """The rank of each example, batch by batch."""
    assigner, indexer, story = Locality(spec, home_bits=16), Indexer(spec), []
    for batch in batches:
        index = indexer.index(batch)
        ranks = assigner.assign(batch, index)
        assigner.learn(index, split(batch, spec, index, ranks))
        story.append(ranks.tolist())
    return story


def test_sizes_are_even_and_sum_to_the_batch() -> None:
    assert share_sizes(10, 4).tolist() == [2, 3, 2, 3]
    assert share_sizes(2, 4).tolist() == [0, 1, 0, 1]
    assert share_sizes(0, 3).tolist() == [0, 0, 0]


def test_without_history_locality_is_contiguous() -> None:
    assert assigned(spec_of(2), [make_batch(0, [[[1], [2], [3], [4], [5]]])]) == [[0, 0, 1, 1, 1]]


def test_examples_return_to_the_rank_that_used_their_rows() -> None:
    first = make_batch(0, [[[1], [2], [3], [4]]])
    again = make_batch(1, [[[4], [1], [3], [2]]])
    assert assigned(spec_of(2), [first, again])[1] == [1, 0, 1, 0]


def test_a_rank_asked_by_too_many_takes_those_who_would_lose_most() -> None:
    first = make_batch(0, [[[1, 2], [3], [8], [9]]])
    # All four want rank 0; those with two rows there win.
    again = make_batch(1, [[[1], [1, 2], [3], [1, 2, 3]]])
    assert assigned(spec_of(2), [first, again])[1] == [1, 0, 1, 0]


@settings(max_examples=150, deadline=None)
@given(traces(max_batches=6), st.sampled_from(sorted(ASSIGNERS)))
def test_balanced_and_blind_to_cache_and_lookahead(trace: tuple[OracleSpec, list[Batch]], assign: str) -> None:
    spec, batches = trace
    spec = dataclasses.replace(spec, assign=assign)
    others = [
        dataclasses.replace(spec, num_slots=0),
        dataclasses.replace(spec, num_slots=500, lookahead=2, policy="paper"),
        dataclasses.replace(spec, num_slots=300, lookahead=9),
    ]
    stories = [
        [[examples.tolist() for examples in plan.examples] for _, plan in plan_batches(batches, other)]
        for other in (spec, *others)
    ]
    assert all(story == stories[0] for story in stories)
    if spec.world_size > 1:
        for batch, examples in zip(batches, stories[0], strict=True):
            assert sorted(itertools.chain.from_iterable(examples)) == list(range(batch.num_examples))
            assert [len(part) for part in examples] == share_sizes(batch.num_examples, spec.world_size).tolist()


@pytest.mark.parametrize("world_size", [2, 7])
def test_locality_moves_fewer_rows_than_contiguous(world_size: int) -> None:
    """Users come back in another order: each has rows of their own."""
    rng = np.random.default_rng(0)
    batches = [
        make_batch(index, [[[user, 1000 + user] for user in rng.permutation(64).tolist()]]) for index in range(6)
    ]
    pulled = {}
    for assign in ASSIGNERS:
        spec = dataclasses.replace(spec_of(world_size), assign=assign)
        plans = [plan for _, plan in plan_batches(batches, spec)]
        pulled[assign] = sum(
            int((consumer.owners != rank).sum()) for plan in plans for rank, consumer in enumerate(plan.consumers)
        )
    assert pulled["locality"] < pulled["contiguous"] / 4
