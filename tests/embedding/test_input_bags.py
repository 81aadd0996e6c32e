"""`InputBags`: which features of an input are those of the batch, however its keys are arranged."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from bagpipe.cache.batch_context import BatchContext
from bagpipe.embedding.input_bags import InputBags, KeyOrder, differs
from tests.effort import at_most

#: Ids of three features, four examples.
IDS = {0: [[1], [], [2, 3], [1]], 1: [[9], [9], [9], [9]], 2: [[], [], [], [4]]}


def _context() -> BatchContext:
    values = np.array([i for bags in IDS.values() for bag in bags for i in bag], np.int64)
    lengths = np.array([[len(bag) for bag in bags] for bags in IDS.values()], np.int32)
    return BatchContext(
        batch_index=0,
        num_examples=4,
        values=values,
        lengths=lengths,
        ids=torch.from_numpy(values),
        bags=torch.from_numpy(lengths.reshape(-1)),
        feature_starts=(0, *lengths.sum(axis=1).cumsum().tolist()),
        groups=(),
    )


@at_most(50)
@given(
    st.permutations([0, 1, 2, None]),
    st.dictionaries(st.sampled_from([0, 1, 2]), st.sampled_from(["ids", "bags"]), max_size=3),
    st.integers(3, 4),
    st.sets(st.sampled_from([0, 1, 2]), min_size=1),
)
def test_each_feature_is_compared(
    keys: list[int | None], changes: dict[int, str], num_examples: int, needed: set[int]
) -> None:
    """Unknown keys have ids of their own. With three examples the last bag of each is left out."""
    bags_of: list[list[list[int]]] = []
    for key in keys:
        bags = [[7], [7, 7], [], [7]] if key is None else [list(bag) for bag in IDS[key]]
        if key is not None and changes.get(key) == "ids":
            bags = [[i + 100 for i in bag] for bag in bags]
        if key is not None and changes.get(key) == "bags":
            bags = bags[1:] + bags[:1]
        bags_of.append(bags[:num_examples])
    inputs = KeyedJaggedTensor(
        keys=[str(key) for key in keys],
        values=torch.tensor([i for bags in bags_of for bag in bags for i in bag], dtype=torch.int32),
        lengths=torch.tensor([len(bag) for bags in bags_of for bag in bags]),
        stride=num_examples,
    )
    order = KeyOrder.of(inputs.keys(), keys, needed)
    context, found = _context(), InputBags.of(inputs, order)
    same = found.same_features(found.starts(), context, context.ids, context.bags)
    expected = {
        key for key, bags in zip(keys, bags_of, strict=True)
        if key in needed and bags + [[]] * (4 - num_examples) == IDS[key]
    }  # fmt: skip
    assert same == expected
    if num_examples == 4:  # as many ids of each feature: then a device compares
        moved = {key for key, change in changes.items() if change == "bags" and IDS[key][1:] + IDS[key][:1] != IDS[key]}
        planned_starts = found.starts() if same == needed and not moved else None
        assert found.planned_starts(context, context.ids, context.bags) == planned_starts
        differs_on_device = bool(differs(inputs, context, order, found.starts()))
        assert differs_on_device == bool(needed - same or moved)
    else:  # bags of two features that are left out have ids
        assert found.planned_starts(context, context.ids, context.bags) is None
