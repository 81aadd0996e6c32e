"""`CachedLookup` without torchrec: any `JaggedInput` works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.cached_lookup import CachedLookup, Column
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.plan import FeatureRef
from bagpipe.testing.recording_streams import RecordingStreams
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


def begun(
    *, last_is_empty: bool = False, streams: RecordingStreams | None = None
) -> tuple[CachedLookup, Batch, Iterator[Any]]:
    """A lookup of feature y in the current batch, which has features x and y, and the steps of the batches after it."""
    rng = np.random.default_rng(0)
    several = [
        random_batch(rng, num_examples=4, num_ids=(5, 5), min_length=1, max_length=3, index=index) for index in range(3)
    ]
    if last_is_empty:
        several[0] = Batch(
            index=0,
            dense=np.zeros((4, 0), np.float32),
            values=np.arange(6) % 5,
            lengths=np.array([[1, 1, 1, 0], [0, 2, 1, 0]], np.int32),
            labels=np.zeros(4, np.float32),
        )
    schema = RowSchema(tables=(TABLE,), optimizer="sgd")
    cache = RowCache(schema, 0, streams=streams)
    reader = CachedLookup(number=0, feature_names=("x", "y"), layout=LAYOUT, columns=[COLUMN])
    reader.bind(cache)
    steps = Job(cache, DictStore(schema), LAYOUT).steps(several)
    next(steps)
    return reader, several[0], steps


def whole(batch: Batch) -> Jagged:
    return Jagged(["x", "y"], torch.from_numpy(batch.values.copy()), torch.from_numpy(batch.lengths.copy()))


def own(reader: CachedLookup, inputs: Jagged) -> Tensor:
    """The vectors of feature y, summed from single rows."""
    cache, key = reader.cache, inputs.names.index("y")
    assert cache is not None
    assert cache.current is not None
    (group,) = cache.current.groups
    planned = group.context.planned.rows.ids.tolist()
    sizes = inputs.sizes[key].tolist()
    ids = iter(inputs.ids[int(inputs.sizes[:key].sum()) :].tolist())
    rows = group.rows.gathered()
    bags = [[rows[planned.index(next(ids))] for _ in range(size)] for size in sizes]
    return torch.stack([torch.stack([torch.zeros(4), *bag]).sum(0) for bag in bags])


def test_the_batch_is_accepted() -> None:
    reader, batch, _ = begun()
    first = int(batch.lengths[0].sum())
    call = reader.begin(whole(batch))
    assert call.starts == {0: 0, 1: first}
    assert call.contexts[0] is call.batch.groups[0].context
    only = Jagged(["y"], torch.from_numpy(batch.values[first:]), torch.from_numpy(batch.lengths[1:]))
    call = reader.begin(only)
    assert call.starts == {1: 0}
    assert call.contexts[0] is call.batch.groups[0].context
    assert torch.equal(reader.vectors(call, 0), own(reader, only))


def test_unknown_keys_are_passed_over() -> None:
    reader, batch, _ = begun()
    lengths = torch.from_numpy(batch.lengths)
    first = int(lengths[0].sum())
    others = torch.arange(5)
    more = Jagged(
        ["z", "y", "w"],
        torch.cat([others, torch.from_numpy(batch.values[first:]), others]),
        torch.stack([torch.tensor([5, 0, 0, 0]), lengths[1], torch.tensor([0, 2, 2, 1])]),
    )
    call = reader.begin(more)
    assert call.starts == {1: 5}
    assert call.contexts[0] is call.batch.groups[0].context
    assert reader.vectors(call, 0).shape == (4, 4)


def test_other_features_may_have_any_ids() -> None:
    reader, batch, _ = begun()
    first = int(batch.lengths[0].sum())
    other = whole(batch)
    other.ids[:first] += 1000
    call = reader.begin(other)
    assert call.contexts[0] is call.batch.groups[0].context


def test_trailing_examples_without_ids_can_be_left_out() -> None:
    reader, batch, _ = begun(last_is_empty=True)
    fewer = Jagged(["x", "y"], torch.from_numpy(batch.values), torch.from_numpy(batch.lengths[:, :-1]))
    assert reader.begin(fewer).contexts[0] is reader.begin(whole(batch)).contexts[0]
    assert torch.equal(reader.pooled(fewer), reader.pooled(whole(batch))[:-1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint64])
def test_other_bags_of_the_batchs_ids_are_looked_up(dtype: torch.dtype) -> None:
    reader, batch, _ = begun()
    first = int(batch.lengths[0].sum())
    mine, lengths = torch.from_numpy(batch.values[first:]), torch.from_numpy(batch.lengths)
    for ids, sizes in (
        (mine.flip(0), lengths[1:]),
        (mine, lengths[1:].flip(1)),
        (mine.repeat(2), lengths[1:].repeat(1, 2)),
        (mine[:1], torch.tensor([[0, 1]])),
        (mine[:0], torch.zeros(1, 0)),
        (mine[:0], torch.zeros(1, 9)),
    ):
        inputs = Jagged(["y"], ids.to(dtype), sizes.to(torch.int64))
        found = reader.pooled(inputs)
        assert found.shape == (sizes.shape[1], 4)
        assert torch.allclose(found, own(reader, inputs)) if len(found) else True


def test_anything_else_is_refused() -> None:
    reader, batch, _ = begun()
    ids, lengths = torch.from_numpy(batch.values), torch.from_numpy(batch.lengths)
    size = int(lengths[1].sum())
    for jagged, message in (
        (Jagged(["x", "z"], ids, lengths), r"lacks \['y'\], and has \['x', 'z'\]"),
        (
            Jagged(["x", "y"], ids[1:], lengths),
            f"8 lengths for 2 keys and 4 examples, which add up to {len(ids)}, but {len(ids) - 1} ids",
        ),
        (Jagged(["y", "z"], ids[:size], lengths), f"add up to {len(ids)}, but {size} ids"),
        (Jagged(["x", "y"], ids, lengths, variable=True), "the same number of examples for every key, got 8 bags"),
        (Jagged(["x", "y"], ids + 100, lengths), r"id \d+ for feature 'y', which is none of the batch's \d+ ids"),
        (Jagged(["x", "y"], -1 - ids, lengths), r"id -\d+ for feature 'y', which is none"),
        (Jagged(["x", "y"], ids.double(), lengths), r"ids of keys \['x', 'y'\] must be integers, got torch.float64"),
    ):
        with pytest.raises(InputError, match=message):
            reader.begin(jagged)


def test_every_call_is_compared() -> None:
    reader, batch, steps = begun()
    for _ in range(2):
        reader.begin(whole(batch))
        changed = whole(batch)
        changed.ids += 1000
        with pytest.raises(InputError, match="none of the batch's"):
            reader.begin(changed)
    next(steps)
    with pytest.raises(InputError, match=r"none of the batch's|add up to"):
        reader.begin(whole(batch))


# ---- on a device -----------------------------------------------------------------------------------------------------


def _copied(inputs: Jagged, change: Callable[[Jagged], object]) -> Jagged:
    copied = Jagged(list(inputs.names), inputs.ids.clone(), inputs.sizes.clone())
    change(copied)
    return copied


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs.ids.copy_(inputs.ids.flip(0)),
        lambda inputs: inputs.ids[-1].add_(1),
        lambda inputs: inputs.sizes.copy_(inputs.sizes.flip(1)),
    ],
)
def test_a_device_compares_later_batches_and_the_host_looks_at_it_later(change: Callable[[Jagged], object]) -> None:
    reader, batch, steps = begun(streams=RecordingStreams())
    cache = reader.cache
    assert cache is not None
    assert reader.begin(whole(batch)).contexts[0] is reader.begin(whole(batch)).contexts[0]
    next(steps)
    assert cache.current is not None
    second = cache.current.context
    mine = Jagged(["x", "y"], torch.from_numpy(second.values), torch.from_numpy(second.lengths))
    for good in (mine, _permuted_keys(mine)):
        call = reader.begin(good)
        assert call.contexts[0] is call.batch.groups[0].context
    cache.verdicts.check()
    next(steps)
    assert cache.current is not None
    third = cache.current.context
    mine = Jagged(["x", "y"], torch.from_numpy(third.values.copy()), torch.from_numpy(third.lengths.copy()))
    reader.begin(_copied(mine, change))
    for look in (cache.verdicts.check, cache.verdicts.check, lambda: cache.verdicts.check_before(3)):
        with pytest.raises(InputError, match=r"batch 2: embedding input has other ids or bags .* \['y'\]"):
            look()
    cache.verdicts.check_before(2)


def _permuted_keys(inputs: Jagged) -> Jagged:
    first = int(inputs.sizes[0].sum())
    return Jagged(["y", "x"], torch.cat([inputs.ids[first:], inputs.ids[:first]]), inputs.sizes.flip(0))


def test_a_device_gives_derived_lookups_to_the_host_in_every_batch() -> None:
    """Calls of a batch are told apart by their order."""
    reader, _, steps = begun(streams=RecordingStreams())
    cache = reader.cache
    assert cache is not None
    for _ in range(3):
        assert cache.current is not None
        context = cache.current.context
        mine = Jagged(["x", "y"], torch.from_numpy(context.values.copy()), torch.from_numpy(context.lengths.copy()))
        assert torch.allclose(reader.pooled(mine), own(reader, mine))
        num_ids = int(mine.sizes[1].sum())
        other = Jagged(["y"], mine.ids[-num_ids:].flip(0), torch.tensor([[0, num_ids]]))
        assert torch.allclose(reader.pooled(other), own(reader, other))
        next(steps, None)
        cache.verdicts.check()


def test_a_device_does_not_compare_with_what_a_model_has_written() -> None:
    reader, batch, steps = begun(streams=RecordingStreams())
    reader.begin(whole(batch))
    next(steps)
    cache = reader.cache
    assert cache is not None
    assert cache.current is not None
    context = cache.current.context
    inputs = Jagged(["x", "y"], context.ids, context.bags.view(2, -1))  # the trainer's inputs share their memory
    assert reader.begin(inputs).contexts[0] is cache.current.groups[0].context
    inputs.ids += 1000
    with pytest.raises(InputError, match="none of the batch's"):
        reader.begin(inputs)


def test_not_begun() -> None:
    reader = CachedLookup(number=0, feature_names=("x", "y"), layout=LAYOUT, columns=[COLUMN])
    nothing = Jagged([], torch.zeros(0), torch.zeros(0, 0))
    with pytest.raises(JobError, match="rows only while a pipeline computes a batch"):
        reader.begin(nothing)
    reader.bind(RowCache(RowSchema(tables=(TABLE,), optimizer="sgd"), 0))
    with pytest.raises(JobError, match="rows only while a pipeline computes a batch"):
        reader.begin(nothing)
