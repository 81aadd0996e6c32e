"""`CachedLookup`: the lookups of one embedding collection in the current batch of a cache. Independent of torchrec.

    KeyedJaggedTensor-like input ──compare: ids and bags as planned?──yes──> index tensors of the plan ──┐
                                                                └──no──> `derived_context` ──────────────┴──> vectors

Every call of every batch is compared with the plan. Keys can be missing (in models that split their input), reordered
or unknown, and trailing examples without ids can be left out. Other bags of the batch's ids, in any number and order,
are looked up as they are; an id that the batch does not have is refused, because its row is not there.

On a CPU the ids themselves are compared. On a device the host must not wait for them, so a call is compared on the host
in the first batch only, which says whether it is planned or derived. A derived one is read by the host in every batch.
Of a planned one the device compares all later batches, and the host looks at the result when it comes (`Verdicts`),
before anything of the batch is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, GroupContext
from bagpipe.cache.derived_lookup import ONLY_OWN_IDS, derived_context
from bagpipe.cache.lookup import ActiveBatch, lookup
from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.staging import to_host
from bagpipe.cache.upload import Uploader
from bagpipe.cache.verdicts import Verdict
from bagpipe.embedding.input_bags import InputBags, JaggedInput, KeyOrder, differs, is_same_memory
from bagpipe.errors import InputError, JobError

__all__ = ["CachedLookup", "Column", "JaggedInput", "LookupCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The source of one embedding name of a collection.

    Attributes:
        name: embedding name: that of the feature, or ``feature@table`` where tables share it.
        feature_name: name of the feature.
        feature: number of the feature in the batch.
        group: position of the table group among those of the collection.
        segment: position of the segment in the group.
        dim: width of the vector.
    """

    name: str
    feature_name: str
    feature: int
    group: int
    segment: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Pooled vectors of a group, or of one of its segments (`segment`: position in the group)."""

    group: int
    segment: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LookupCall:
    """One call of a collection.

    Attributes:
        batch: the batch being computed.
        inputs: the input.
        starts: by feature number, the start of its ids in `inputs`.
        contexts: by table group of the collection: that of the batch, or of a derived lookup.
    """

    batch: ActiveBatch
    inputs: JaggedInput
    starts: Mapping[int, int]
    contexts: tuple[GroupContext, ...]


class CachedLookup:
    """The lookups of one collection.

    Args:
        number: number of the collection in the layout.
        feature_names: features of the batch, in key order.
        layout: layout of the model.
        columns: embedding names of the collection, in its order.

    Attributes:
        columns: as given.
        groups: table groups of the collection.
        cache: the cache that holds the batch; None until bound.
    """

    def __init__(
        self, *, number: int, feature_names: Sequence[str], layout: LookupLayout, columns: Sequence[Column]
    ) -> None:
        self.columns = tuple(columns)
        self.groups = layout.collection_groups(number)
        self.cache: RowCache | None = None
        self._features = layout.features
        self._feature_names = tuple(feature_names)
        self._feature_numbers = {name: position for position, name in enumerate(feature_names)}
        self._needed = {column.feature for column in columns}
        self._order: KeyOrder | None = None  # of the latest input
        self._parts = _parts(self)
        self._batch: ActiveBatch | None = None
        self._num_calls = 0  # of this batch
        self._is_planned: dict[int, bool] = {}  # by number of the call in its batch; on a device

    def bind(self, cache: RowCache) -> None:
        """Read from `cache`."""
        self.cache = cache
        self._batch, self._num_calls = None, 0
        self._is_planned = {}

    def __deepcopy__(self, memo: object) -> CachedLookup:
        """A copy of a model has dense parameters of its own, and reads the rows of the same batch."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A model in a file has no rows: they are in the store."""
        return {**vars(self), "cache": None, "_batch": None, "_num_calls": 0, "_is_planned": {}}

    def begin(self, inputs: JaggedInput) -> LookupCall:
        """Compare an input with the batch being computed.

        Raises:
            JobError: no cache is bound, or no batch is begun.
            InputError: `inputs` lacks a feature, has an id that the batch does not have, or cannot be read.
        """
        cache = self.cache
        batch = None if cache is None else cache.current
        if cache is None or batch is None:
            raise JobError(
                "a table has rows only while a pipeline computes a batch: progress and train call the model, "
                "evaluate(loader) scores other batches, and rows(table)[ids] reads rows"
            )
        if batch is not self._batch:
            self._batch, self._num_calls = batch, 0
        number, self._num_calls = self._num_calls, self._num_calls + 1
        order = self._order_of(inputs)
        if not cache.streams.is_async or inputs.values().device.type != cache.device.type:
            return self._on_host(cache, batch, inputs, order)
        return self._on_device(cache, batch, inputs, order, number)

    def vectors(self, call: LookupCall, position: int) -> Tensor:
        """``[examples of inputs, segments * dim]``: vectors of a group, differentiable; ``[n, dim]`` unpooled.

        Args:
            call: of `begin`.
            position: of the group among those of the collection.
        """
        group, context, num_examples = self.groups[position], call.contexts[position], call.inputs.stride()
        active = call.batch.groups[group.index]
        weights = self._weights(call, active.dtype, position) if group.lookup.weighted else None
        vectors = lookup(active, weights, context)
        is_part = group.lookup.pooling != "none" and num_examples < len(vectors)
        return vectors.narrow(0, 0, num_examples) if is_part else vectors

    def pooled(self, inputs: JaggedInput) -> Tensor:
        """``[examples of inputs, sum of dims]``: vectors of all columns, differentiable; pooled collections only.

        Raises:
            JobError, InputError: see `begin`.
        """
        call = self.begin(inputs)
        pooled = [self.vectors(call, position) for position in range(len(self.groups))]
        # `split` has one backward for all parts; each slice would allocate a gradient of the whole group.
        segments = {
            part.group: torch.split(pooled[part.group], self.groups[part.group].dim, dim=1)
            for part in self._parts
            if part.segment is not None
        }
        parts = [
            pooled[part.group] if part.segment is None else segments[part.group][part.segment] for part in self._parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _weights(self, call: LookupCall, dtype: torch.dtype, position: int) -> Tensor:
        """``[n]``: per-id weights of a group, segment after segment, differentiable."""
        weights = call.inputs.weights_or_none()
        if weights is None:
            raise InputError("a weighted embedding collection needs weights in its input, got none")
        if weights.numel() != call.inputs.values().numel():
            raise InputError(f"embedding input has {call.inputs.values().numel()} ids, but {weights.numel()} weights")
        group = self.groups[position]
        refs = self._features[group.first_segment : group.end_segment]
        parts = [
            weights.narrow(0, call.starts[ref.feature], size)
            for ref, size in zip(refs, call.contexts[position].segment_sizes, strict=True)
        ]
        return torch.cat(parts).to(dtype)

    def _order_of(self, inputs: JaggedInput) -> KeyOrder:
        """The order of the keys, which must have those of the collection."""
        keys, order = inputs.keys(), self._order
        if order is None or keys != order.names:
            numbers = [self._feature_numbers.get(key) for key in keys]
            lacking = [self._feature_names[number] for number in sorted(self._needed.difference(numbers))]
            if lacking:
                raise InputError(
                    f"embedding input must have the features of the collection: it lacks {lacking}, and has {keys}"
                )
            self._order = order = KeyOrder.of(keys, numbers, self._needed)
        if inputs.variable_stride_per_key():
            raise InputError(
                f"embedding input must have the same number of examples for every key, got {inputs.lengths().numel()} "
                f"bags for keys {order.names}"
            )
        return order

    def _planned(self, batch: ActiveBatch) -> tuple[GroupContext, ...]:
        return tuple(batch.groups[group.index].context for group in self.groups)

    # ---- ids that the host can read ------------------------------------------------------------------------------

    def _on_host(self, cache: RowCache, batch: ActiveBatch, inputs: JaggedInput, order: KeyOrder) -> LookupCall:
        """Compare ids on the host, and make the contexts of derived lookups."""
        context = batch.context
        if cache.streams.is_async:  # then the model cannot write to the arrays of the batch
            arrays = np.ascontiguousarray(context.values), np.ascontiguousarray(context.lengths).reshape(-1)
            planned = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
        else:
            planned = context.ids, context.bags
        bags = InputBags.of(inputs, order)
        starts = bags.planned_starts(context, *planned)
        contexts = self._planned(batch)
        if starts is None:
            starts = bags.starts()
            contexts = self._derived(cache, batch, bags, starts, bags.same_features(starts, context, *planned))
        return LookupCall(batch=batch, inputs=inputs, starts=order.by_feature(starts), contexts=contexts)

    def _derived(
        self, cache: RowCache, batch: ActiveBatch, bags: InputBags, starts: Sequence[int], same: Collection[int]
    ) -> tuple[GroupContext, ...]:
        """By group, a context of its own, unless it reads only features that are the `same` as planned."""
        contexts = []
        for group in self.groups:
            refs = self._features[group.first_segment : group.end_segment]
            own = batch.groups[group.index].context
            if not all(ref.feature in same for ref in refs):
                chosen = [bags.order.keys[ref.feature] for ref in refs]
                own = derived_context(
                    own,
                    [ref.table for ref in refs],
                    [self._feature_names[ref.feature] for ref in refs],
                    [bags.ids[starts[key] : starts[key + 1]].numpy() for key in chosen],
                    bags.lengths[chosen].numpy(),
                    Uploader(cache.device, cache.dtype, max_terms=cache.kernels.max_terms),
                )
            contexts.append(own)
        return tuple(contexts)

    # ---- ids on a device -----------------------------------------------------------------------------------------

    def _on_device(
        self, cache: RowCache, batch: ActiveBatch, inputs: JaggedInput, order: KeyOrder, number: int
    ) -> LookupCall:
        """Compare ids on the device, or on the host if the call is not known to be planned."""
        context = batch.context
        # A model that has written to the ids of its input may have written to those that the device compares with.
        compares = self._is_planned.get(number, False) and context.versions == batch.versions
        starts = _planned_starts(context, inputs, order) if compares else None
        if starts is None:
            call = self._on_host(cache, batch, inputs, order)
            pairs = zip(call.contexts, self._planned(batch), strict=True)
            self._is_planned.setdefault(number, all(own is planned for own, planned in pairs))
            return call
        if not is_same_memory(inputs, context):
            names = [self._feature_names[feature] for feature in sorted(self._needed)]
            flag = to_host(cache.streams, differs(inputs, context, order, starts))
            error = partial(_changed, context.batch_index, names)
            cache.verdicts.add(Verdict(context.batch_index, flag, _is_false, error))
        return LookupCall(batch=batch, inputs=inputs, starts=order.by_feature(starts), contexts=self._planned(batch))


def _planned_starts(context: BatchContext, inputs: JaggedInput, order: KeyOrder) -> list[int] | None:
    """By key, the start of its ids, if there are as many as planned; None: there are others.

    These are host values, so nothing waits for the device, unless there are unknown keys.
    """
    num_examples = inputs.stride()
    if num_examples != context.num_examples and (
        num_examples > context.num_examples or context.lengths[list(order.keys), num_examples:].any()
    ):
        return None
    # On a device this waits for it, unless the input knows its sizes already; so only with unknown keys.
    sizes = list(inputs.length_per_key()) if order.has_unknown else ()
    starts = order.starts(context, sizes)
    is_same = starts[-1] == inputs.values().numel() and (not sizes or starts == list(accumulate(sizes, initial=0)))
    return starts if is_same else None


def _is_false(flag: Tensor) -> bool:
    return not bool(flag)


def _changed(batch: int, names: Sequence[str]) -> InputError:
    return InputError(
        f"batch {batch}: embedding input has other ids or bags than the batch for one of the features {list(names)}, "
        "and had the batch's own in the first batch: on a device, a call of a collection gets ids of the model's own "
        f"making from the first batch on, or never; {ONLY_OWN_IDS}"
    )


def _parts(reader: CachedLookup) -> tuple[_Part, ...]:
    """The output columns as parts: a whole group if all its segments follow in order, else single segments."""
    parts: list[_Part] = []
    for group, columns in groupby(reader.columns, key=lambda column: column.group):
        segments = [column.segment for column in columns]
        if segments == list(range(reader.groups[group].num_segments)):
            parts.append(_Part(group=group))
        else:
            parts.extend(_Part(group=group, segment=segment) for segment in segments)
    return tuple(parts)
