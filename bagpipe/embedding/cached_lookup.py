"""`CachedLookup`: the lookups of one embedding collection in the current batch of a cache. Independent of torchrec.

    KeyedJaggedTensor-like input ──check: is it the current batch?──> vectors of each table group of the collection

The plan covers the ids of the batch, so the input must hold these ids, in the same number and order for each key. Keys
can be missing (in models that split their input), reordered or unknown, and trailing examples without ids can be left
out, but ids must not be hashed, filtered or padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext
from bagpipe.cache.lookup import ActiveBatch, lookup
from bagpipe.cache.lookup_layout import LookupLayout, TableGroup
from bagpipe.cache.row_cache import RowCache
from bagpipe.errors import InputError, JobError

__all__ = ["CachedLookup", "Column", "JaggedInput"]

_UNCHANGED = "ids must reach the collection unchanged (hash them in the data schema, not in the model)"


class JaggedInput(Protocol):
    """The part of torchrec's KeyedJaggedTensor that `CachedLookup` uses."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride(self) -> int: ...
    def length_per_key(self) -> list[int]: ...
    def variable_stride_per_key(self) -> bool: ...


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
        self._parts = _parts(self)
        self._ids_checked = False

    def bind(self, cache: RowCache) -> None:
        """Read from `cache`."""
        self.cache = cache
        self._ids_checked = False

    def begin(self, inputs: JaggedInput) -> tuple[ActiveBatch, dict[int, int]]:
        """The batch being computed, and the start of each feature's ids in `inputs`, by feature number.

        Raises:
            JobError: no cache is bound, or no batch is begun.
            InputError: `inputs` is not that batch.
        """
        if self.cache is None:
            raise JobError("the model has no cache: call bind(cache) before its forward")
        batch = self.cache.current
        if batch is None:
            raise JobError("the cache has begun no batch: call RowCache.begin before the model's forward")
        starts = self._check(batch.context, inputs)
        if not self._ids_checked:
            self._check_ids(batch.context, inputs, starts)
            self._ids_checked = True
        return batch, starts

    def vectors(self, batch: ActiveBatch, group: TableGroup, inputs: JaggedInput, starts: dict[int, int]) -> Tensor:
        """``[examples of inputs, segments * dim]``: vectors of a group, differentiable; ``[n, dim]`` unpooled."""
        weights = self._weights(batch, group, inputs, starts) if group.lookup.weighted else None
        vectors = lookup(batch.groups[group.index], weights)
        is_part = group.lookup.pooling != "none" and inputs.stride() < batch.context.num_examples
        return vectors.narrow(0, 0, inputs.stride()) if is_part else vectors

    def pooled(self, inputs: JaggedInput) -> Tensor:
        """``[examples of inputs, sum of dims]``: vectors of all columns, differentiable; pooled collections only.

        Raises:
            JobError, InputError: see `begin`.
        """
        batch, starts = self.begin(inputs)
        pooled = [self.vectors(batch, group, inputs, starts) for group in self.groups]
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

    def _weights(self, batch: ActiveBatch, group: TableGroup, inputs: JaggedInput, starts: dict[int, int]) -> Tensor:
        """``[n]``: per-id weights of a group, segment after segment, differentiable."""
        weights = inputs.weights_or_none()
        if weights is None:
            raise InputError("a weighted embedding collection needs weights in its input, got none")
        active = batch.groups[group.index]
        refs = self._features[group.first_segment : group.end_segment]
        parts = [
            weights.narrow(0, starts[ref.feature], size)
            for ref, size in zip(refs, active.context.segment_sizes, strict=True)
        ]
        return torch.cat(parts).to(active.dtype)

    def _check(self, context: BatchContext, inputs: JaggedInput) -> dict[int, int]:
        """Check keys and numbers of examples and ids. These are host values, so nothing waits for the device."""
        keys = list(inputs.keys())
        numbers = [self._feature_numbers.get(key) for key in keys]
        lacking = [self._feature_names[number] for number in sorted(self._needed.difference(numbers))]
        if lacking:
            raise InputError(
                f"embedding input must have the features of the collection: it lacks {lacking}, and has {keys}"
            )
        known = [number for number in numbers if number is not None]
        self._check_examples(context, inputs, known)
        sizes = [context.feature_sizes[number] for number in known]
        if len(known) < len(keys):
            # On a device this waits for it, unless the input knows its sizes already; so only with unknown keys.
            all_sizes = list(inputs.length_per_key())
            found = [size for number, size in zip(numbers, all_sizes, strict=True) if number is not None]
            is_same, expected, got = found == sizes, sum(sizes), sum(found)
        else:
            all_sizes, expected, got = sizes, sum(sizes), inputs.values().numel()
            is_same = expected == got
        if not is_same:
            raise InputError(
                f"embedding input must hold the batch's own ids, unchanged: expected {expected} ids for "
                f"{[self._feature_names[number] for number in known]}, got {got}: {_UNCHANGED}"
            )
        starts = accumulate(all_sizes, initial=0)
        return {number: start for number, start in zip(numbers, starts, strict=False) if number is not None}

    def _check_examples(self, context: BatchContext, inputs: JaggedInput, features: Sequence[int]) -> None:
        """Check the number of examples: the batch's, or fewer if the others have no ids."""
        num = context.num_examples
        if not inputs.variable_stride_per_key():
            num = inputs.stride()
            if num == context.num_examples or (
                num < context.num_examples and not context.lengths[list(features), num:].any()
            ):
                return
        raise InputError(
            f"embedding input must have the batch's {context.num_examples} examples for every feature, "
            f"got {inputs.lengths().numel()} bags for {len(inputs.keys())} features"
        )

    def _check_ids(self, context: BatchContext, inputs: JaggedInput, starts: dict[int, int]) -> None:
        """Compare ids and bags. Only for the first batch, because the copy from a device blocks."""
        planned_starts = list(accumulate(context.feature_sizes, initial=0))
        ids, num = inputs.values().detach().cpu().numpy(), inputs.stride()
        lengths = inputs.lengths().detach().cpu().numpy().reshape(len(inputs.keys()), num)
        positions = {self._feature_numbers.get(key): position for position, key in enumerate(inputs.keys())}
        for feature, start in starts.items():
            size, planned_start = context.feature_sizes[feature], planned_starts[feature]
            same_ids = np.array_equal(ids[start : start + size], context.values[planned_start : planned_start + size])
            if not same_ids or not np.array_equal(lengths[positions[feature]], context.lengths[feature, :num]):
                raise InputError(
                    f"embedding input has other {'bags' if same_ids else 'ids'} for feature "
                    f"{self._feature_names[feature]!r} than the batch: {_UNCHANGED}"
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
