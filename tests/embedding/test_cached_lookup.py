"""`CachedLookup` without torchrec: any `JaggedInput` works."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.cached_lookup import CachedLookup, Column
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema, RowTable
from tests.cache.plans import DictStore, Job, random_batch

TABLE = RowTable(name="a", dim=4)
LAYOUT = build_layout([TABLE], [FeatureRef(feature=1, table=0)], [TableLookup()])
COLUMN = Column(name="y", feature_name="y", feature=1, group=0, segment=0, dim=4)


@dataclass
class Jagged:
    names: list[str]
    ids: Tensor
    sizes: Tensor
    variable: bool = False

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> Tensor:
        return self.ids

    def lengths(self) -> Tensor:
        return self.sizes.reshape(-1)

    def weights_or_none(self) -> Tensor | None:
        return None

    def stride(self) -> int:
        return int(self.sizes.shape[1])

    def length_per_key(self) -> list[int]:
        return [int(size) for size in self.sizes.sum(1)]

    def variable_stride_per_key(self) -> bool:
        return self.variable


def begun(*, last_is_empty: bool = False) -> tuple[CachedLookup, Batch]:
    """A lookup of feature y in the current batch, which has features x and y."""
    batch = random_batch(np.random.default_rng(0), num_examples=4, num_ids=(5, 5), max_length=3)
    if last_is_empty:
        batch = Batch(
            index=0,
            dense=np.zeros((4, 0), np.float32),
            values=np.arange(6) % 5,
            lengths=np.array([[1, 1, 1, 0], [0, 2, 1, 0]], np.int32),
            labels=np.zeros(4, np.float32),
        )
    schema = RowSchema(tables=(TABLE,), optimizer="sgd")
    cache = RowCache(schema, 0)
    reader = CachedLookup(number=0, feature_names=("x", "y"), layout=LAYOUT, columns=[COLUMN])
    reader.bind(cache)
    next(Job(cache, DictStore(schema), LAYOUT).steps([batch]))
    return reader, batch


def test_the_batch_is_accepted() -> None:
    reader, batch = begun()
    first = int(batch.lengths[0].sum())
    whole = Jagged(["x", "y"], torch.from_numpy(batch.values), torch.from_numpy(batch.lengths))
    step, starts = reader.begin(whole)
    assert starts == {0: 0, 1: first}
    only = Jagged(["y"], torch.from_numpy(batch.values[first:]), torch.from_numpy(batch.lengths[1:]))
    assert reader.begin(only)[1] == {1: 0}
    assert reader.vectors(step, reader.groups[0], only, {1: 0}).shape == (4, 4)


def test_unknown_keys_are_passed_over() -> None:
    reader, batch = begun()
    lengths = torch.from_numpy(batch.lengths)
    first = int(lengths[0].sum())
    others = torch.arange(5)
    more = Jagged(
        ["z", "y", "w"],
        torch.cat([others, torch.from_numpy(batch.values[first:]), others]),
        torch.stack([torch.tensor([5, 0, 0, 0]), lengths[1], torch.tensor([0, 2, 2, 1])]),
    )
    step, starts = reader.begin(more)
    assert starts == {1: 5}
    assert reader.vectors(step, reader.groups[0], more, starts).shape == (4, 4)


def test_trailing_examples_without_ids_can_be_left_out() -> None:
    reader, batch = begun(last_is_empty=True)
    fewer = Jagged(["x", "y"], torch.from_numpy(batch.values), torch.from_numpy(batch.lengths[:, :-1]))
    whole = Jagged(["x", "y"], torch.from_numpy(batch.values), torch.from_numpy(batch.lengths))
    assert torch.equal(reader.pooled(fewer), reader.pooled(whole)[:-1])


def test_anything_else_is_refused() -> None:
    reader, batch = begun()
    ids, lengths = torch.from_numpy(batch.values), torch.from_numpy(batch.lengths)
    size = int(lengths[1].sum())
    for jagged, message in (
        (Jagged(["x", "z"], ids, lengths), r"lacks \['y'\], and has \['x', 'z'\]"),
        (Jagged(["x", "y"], ids[1:], lengths), f"expected {len(ids)} ids .* got {len(ids) - 1}"),
        (Jagged(["y", "z"], ids, lengths), rf"expected {size} ids .*\['y'\], got {len(ids) - size}"),
        (Jagged(["x", "y"], ids, lengths[:, :-1]), "4 examples for every feature, got 6 bags for 2 features"),
        (Jagged(["x", "y"], ids, torch.cat([lengths, lengths], 1)), "4 examples for every feature, got 16 bags"),
        (Jagged(["x", "y"], ids, lengths, variable=True), "4 examples for every feature"),
        (Jagged(["x", "y"], ids.flip(0) + 1, lengths), "other ids for feature 'x' than the batch"),
        (Jagged(["x", "y"], ids, lengths.roll(1, 1)), "other bags for feature 'x' than the batch"),
    ):
        with pytest.raises(InputError, match=message):
            reader.begin(jagged)


def test_ids_are_compared_once_per_cache() -> None:
    """Comparing ids waits for the device, so only the first batch is checked."""
    reader, batch = begun()
    lengths = torch.from_numpy(batch.lengths)
    reader.begin(Jagged(["x", "y"], torch.from_numpy(batch.values), lengths))
    changed = Jagged(["x", "y"], torch.from_numpy(batch.values) + 1, lengths)
    reader.begin(changed)
    cache = reader.cache
    assert cache is not None
    reader.bind(cache)
    with pytest.raises(InputError, match="other ids"):
        reader.begin(changed)


def test_not_begun() -> None:
    reader = CachedLookup(number=0, feature_names=("x", "y"), layout=LAYOUT, columns=[COLUMN])
    nothing = Jagged([], torch.zeros(0), torch.zeros(0, 0))
    with pytest.raises(JobError, match="the model has no cache"):
        reader.begin(nothing)
    reader.bind(RowCache(RowSchema(tables=(TABLE,), optimizer="sgd"), 0))
    with pytest.raises(JobError, match="the cache has begun no batch"):
        reader.begin(nothing)
