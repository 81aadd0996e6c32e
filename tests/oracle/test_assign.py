from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.assign import MAX_SHARE, Locality, share_bounds
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner, plan_batches
from bagpipe.oracle.rank_index import split_index
from bagpipe.types.batch import Batch
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
    """Rank of each example, batch by batch."""
    assigner, indexer, assignments = Locality(spec, home_bits=16), Indexer(spec), []
    for batch in batches:
        index = indexer.index(batch)
        ranks = assigner.assign(batch, index)
        assigner.learn(index, split_index(batch, spec, index, ranks))
        assignments.append(ranks.tolist())
    return assignments


def test_bounds_are_even_unless_shares_say_otherwise() -> None:
    assert share_bounds(10, (1,) * 4) == (0, 2, 5, 7, 10)
    assert share_bounds(2, (1,) * 4) == (0, 0, 1, 1, 2)
    assert share_bounds(0, (5, 0, 1)) == (0, 0, 0, 0)
    assert share_bounds(7, (1, 0, 0, 1)) == (0, 3, 3, 3, 7)
    assert share_bounds(3, (0, MAX_SHARE, MAX_SHARE)) == (0, 0, 1, 3)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(1, 9))
def test_bounds_follow_the_shares(num_examples: int, shares: list[int], factor: int) -> None:
    bounds = share_bounds(num_examples, shares)
    assert bounds[0] == 0
    assert bounds[-1] == num_examples
    for share, (start, stop) in zip(shares, itertools.pairwise(bounds), strict=True):
        assert abs(stop - start - num_examples * share / sum(shares)) < 1
        assert share or start == stop
    assert share_bounds(num_examples, [factor * share for share in shares]) == bounds


@given(traces(max_batches=5), st.integers(1, 9))
def test_equal_shares_change_no_byte_of_a_plan(trace: tuple[OracleSpec, list[Batch]], share: int) -> None:
    spec, batches = trace
    specs = [dataclasses.replace(spec, example_shares=shares) for shares in ((), (share,) * spec.world_size)]
    first, second = ([_plain(plan) for _, plan in plan_batches(batches, spec)] for spec in specs)
    assert first == second


def _plain(value: Any) -> Any:
    """Records as nested tuples, arrays as their dtype and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if dataclasses.is_dataclass(value):
        return tuple(_plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value


def test_only_one_rank_reads() -> None:
    spec = dataclasses.replace(spec_of(3), assign="contiguous", example_shares=(0, 2, 0))
    batches = [make_batch(index, [[[index], [7], [8, index]]]) for index in range(4)]
    for _, plan in plan_batches(batches, spec):
        assert [len(examples) for examples in plan.examples] == [0, 3, 0]
        assert [len(consumer.unique) for consumer in plan.consumers] == [0, 3, 0]


@pytest.mark.parametrize(
    ("shares", "assign", "words"),
    [
        ((1, 1), "contiguous", "example shares: expected one for each of 3 ranks, got 2"),
        ((1, -1, 1), "contiguous", "expected a number from 0 to 2147483647 for rank 1, got -1"),
        ((1, 1, 1 << 31), "contiguous", "expected a number from 0 to 2147483647 for rank 2, got 2147483648"),
        ((0, 0, 0), "contiguous", "expected a rank with a share above 0"),
        ((1, 0, 1), "locality", r"cacher.assign must be contiguous .* unequal shares of a batch \(1, 0, 1\)"),
    ],
)
def test_shares_that_cannot_be_given(shares: tuple[int, ...], assign: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_planner(dataclasses.replace(spec_of(3), assign=assign, example_shares=shares))


def test_without_history_locality_is_contiguous() -> None:
    assert assigned(spec_of(2), [make_batch(0, [[[1], [2], [3], [4], [5]]])]) == [[0, 0, 1, 1, 1]]


def test_examples_return_to_the_rank_that_used_their_rows() -> None:
    first = make_batch(0, [[[1], [2], [3], [4]]])
    again = make_batch(1, [[[4], [1], [3], [2]]])
    assert assigned(spec_of(2), [first, again])[1] == [1, 0, 1, 0]


def test_an_overloaded_rank_takes_the_examples_that_gain_most() -> None:
    first = make_batch(0, [[[1, 2], [3], [8], [9]]])
    # All four prefer rank 0; those with two rows there win.
    again = make_batch(1, [[[1], [1, 2], [3], [1, 2, 3]]])
    assert assigned(spec_of(2), [first, again])[1] == [1, 0, 1, 0]


@given(traces(max_batches=6), st.sampled_from(["contiguous", "locality"]))
def test_balanced_and_blind_to_cache_and_lookahead(trace: tuple[OracleSpec, list[Batch]], assign: str) -> None:
    spec, batches = trace
    shares = spec.example_shares if assign == "contiguous" else ()
    spec = dataclasses.replace(spec, assign=assign, example_shares=shares)
    others = [
        dataclasses.replace(spec, num_slots=0, grows=False),
        dataclasses.replace(spec, num_slots=500, lookahead=2, policy="drop-unused"),
        dataclasses.replace(spec, num_slots=300, lookahead=9),
    ]
    results = [
        [[examples.tolist() for examples in plan.examples] for _, plan in plan_batches(batches, other)]
        for other in (spec, *others)
    ]
    assert all(assignments == results[0] for assignments in results)
    if spec.world_size > 1:
        for batch, examples in zip(batches, results[0], strict=True):
            assert sorted(itertools.chain.from_iterable(examples)) == list(range(batch.num_examples))
            bounds = share_bounds(batch.num_examples, spec.example_shares or (1,) * spec.world_size)
            assert [len(part) for part in examples] == [stop - start for start, stop in itertools.pairwise(bounds)]


@given(traces(max_batches=6).filter(lambda trace: trace[0].assign == "own" and trace[0].world_size > 1))
def test_ranks_keep_their_own_examples(trace: tuple[OracleSpec, list[Batch]]) -> None:
    for batch, plan in plan_batches(trace[1], trace[0]):
        assert list(itertools.chain.from_iterable(plan.examples)) == list(range(batch.num_examples))
        assert tuple(map(len, plan.examples)) == batch.rank_examples


@pytest.mark.parametrize("brought", [(), (1, 2), (1, 1, 0), (3, -1, 1)])
def test_the_ranks_examples_must_be_known(brought: tuple[int, ...]) -> None:
    batch = dataclasses.replace(make_batch(4, [[[1], [2], [3]]]), rank_examples=brought)
    spec = dataclasses.replace(spec_of(3), assign="own")
    words = r"batch 4: expected the examples that each of 3 ranks brought, 3 in all, got \["
    with pytest.raises(InputError, match=words):
        make_planner(spec).push(batch)


@pytest.mark.parametrize("world_size", [2, 7])
def test_locality_moves_fewer_rows_than_contiguous(world_size: int) -> None:
    """Users return in another order; each has separate rows."""
    rng = np.random.default_rng(0)
    batches = [
        make_batch(index, [[[user, 1000 + user] for user in rng.permutation(64).tolist()]]) for index in range(6)
    ]
    pulled = {}
    for assign in ("contiguous", "locality"):
        spec = dataclasses.replace(spec_of(world_size), assign=assign)
        plans = [plan for _, plan in plan_batches(batches, spec)]
        pulled[assign] = sum(
            int((consumer.owners != rank).sum()) for plan in plans for rank, consumer in enumerate(plan.consumers)
        )
    assert pulled["locality"] < pulled["contiguous"] / 4
