"""`InputBags`: ids and bags of a collection's input on the host, by feature; and comparisons with those of a batch.

keys ──KeyOrder──> runs: keys that follow one another as their features do in the batch
on the host    InputBags.of(inputs) ──planned_starts: memory of each run──> all as planned, the usual case
                                    ──same_features──> features whose ids and bags are those of the batch
on the device  differs ──> bool scalar, which nobody waits for
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext
from bagpipe.embedding.integer_ids import as_int64
from bagpipe.errors import InputError

__all__ = ["InputBags", "JaggedInput", "KeyOrder", "differs", "is_same_memory"]

#: Compares memory and keeps the interpreter. Operators of torch and numpy release it, and may wait to get it back.
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class JaggedInput(Protocol):
    """The part of torchrec's KeyedJaggedTensor that lookups use."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride(self) -> int: ...
    def length_per_key(self) -> list[int]: ...
    def variable_stride_per_key(self) -> bool: ...


class _Run(NamedTuple):
    """Consecutive keys of consecutive features."""

    key: int
    feature: int
    num: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyOrder:
    """The keys of an input.

    Attributes:
        names: the keys.
        features: number of the feature of each key; None: the batch has none of this name.
        keys: feature number -> position of its key.
        has_unknown: there are keys without a feature.
        runs: of all keys with a feature.
        needed: of those whose ids are looked up.
    """

    names: list[str]
    features: tuple[int | None, ...]
    keys: dict[int, int]
    has_unknown: bool
    runs: tuple[_Run, ...]
    needed: tuple[_Run, ...]

    @classmethod
    def of(cls, names: Sequence[str], features: Sequence[int | None], needed: Collection[int]) -> KeyOrder:
        """The order of keys, of which the features `needed` are looked up."""
        known = [(key, feature) for key, feature in enumerate(features) if feature is not None]
        return cls(
            names=list(names),
            features=tuple(features),
            keys={feature: key for key, feature in known},
            has_unknown=None in features,
            runs=_runs(known),
            needed=_runs(pair for pair in known if pair[1] in needed),
        )

    def starts(self, context: BatchContext, sizes: Sequence[int] = ()) -> list[int]:
        """By key, the start of its ids where all are as planned; and the end of all.

        Args:
            context: of the batch.
            sizes: ids of each key, which count for unknown keys only.
        """
        planned = context.feature_starts
        return list(
            accumulate(
                (
                    sizes[key] if feature is None else planned[feature + 1] - planned[feature]
                    for key, feature in enumerate(self.features)
                ),
                initial=0,
            )
        )

    def by_feature(self, starts: Sequence[int]) -> dict[int, int]:
        """Feature number -> start of its ids; `starts`: by key."""
        return {feature: starts[key] for feature, key in self.keys.items()}


def _runs(pairs: Iterable[tuple[int, int]]) -> tuple[_Run, ...]:
    """The runs of (key, feature) pairs in the order of the keys."""
    runs: list[_Run] = []
    for key, feature in pairs:
        last = runs[-1] if runs else None
        if last is not None and (key, feature) == (last.key + last.num, last.feature + last.num):
            runs[-1] = last._replace(num=last.num + 1)
        else:
            runs.append(_Run(key, feature, 1))
    return tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputBags:
    """Ids and bags of an input.

    Attributes:
        order: of its keys.
        ids: int64 ``[n]``, key after key, contiguous.
        lengths: int32 ``[keys, examples]``, ids per bag, contiguous.
    """

    order: KeyOrder
    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, inputs: JaggedInput, order: KeyOrder) -> InputBags:
        """Those of an input. Waits for its device.

        Raises:
            InputError: ids are no integers, or there are not as many lengths as bags.
        """
        ids, lengths, num_bags = inputs.values(), inputs.lengths(), len(order.names) * inputs.stride()
        if not _is_plain(ids, torch.int64):
            ids = as_int64(ids.detach(), f"ids of keys {order.names}").cpu().contiguous()
        if not _is_plain(lengths, torch.int32):
            lengths = lengths.detach().cpu().to(torch.int32).contiguous()
        if lengths.numel() != num_bags:
            raise _misfit(order, lengths, ids, inputs.stride())
        return cls(order=order, ids=ids, lengths=lengths.view(len(order.names), inputs.stride()))

    @property
    def num_examples(self) -> int:
        return int(self.lengths.shape[1])

    def starts(self) -> list[int]:
        """By key, the start of its ids; and the end of all.

        Raises:
            InputError: ids and lengths do not fit.
        """
        starts = list(accumulate(self.lengths.sum(1).tolist(), initial=0))
        if starts[-1] != self.ids.numel():
            raise _misfit(self.order, self.lengths, self.ids, self.num_examples)
        return starts

    def planned_starts(self, context: BatchContext, ids: Tensor, bags: Tensor) -> list[int] | None:
        """By key, the start of its ids, if the needed ids and all bags are those of a batch; None: some are not.

        Args:
            context: of the batch.
            ids: int64 ``[num_occurrences]``, its ids on the host, contiguous.
            bags: int32 ``[num_features * num_examples]``, its ids per bag, contiguous.
        """
        num_examples, num_planned = self.num_examples, context.num_examples
        if num_examples > num_planned:
            return None
        planned = context.feature_starts
        starts = self.order.starts(context, self.lengths.sum(1).tolist() if self.order.has_unknown else ())
        if starts[-1] != self.ids.numel():
            return None
        runs = self.order.runs
        if num_examples < num_planned:  # trailing examples without ids can be left out: keys do not follow one another
            by_bag = bags.view(-1, num_planned)
            if any(by_bag[feature : feature + count, num_examples:].any() for _, feature, count in runs):
                return None
            runs = tuple(_Run(key + n, feature + n, 1) for key, feature, count in runs for n in range(count))
        bag_spans = [(key * num_examples, feature * num_planned, count * num_examples) for key, feature, count in runs]
        id_spans = [
            (starts[key], planned[feature], planned[feature + count] - planned[feature])
            for key, feature, count in self.order.needed
        ]
        if _is_other(self.lengths, bags, bag_spans) or _is_other(self.ids, ids, id_spans):
            return None
        return starts

    def same_features(self, starts: Sequence[int], context: BatchContext, ids: Tensor, bags: Tensor) -> set[int]:
        """The needed features whose ids and bags are those of a batch.

        Args:
            starts: of `starts`.
            context, ids, bags: as in `planned_starts`.
        """
        planned, batch_starts = bags.view(-1, context.num_examples), context.feature_starts
        found = set()
        for run in self.order.needed:
            for n in range(run.num):
                key, feature = run.key + n, run.feature + n
                own, batch = slice(*starts[key : key + 2]), slice(*batch_starts[feature : feature + 2])
                is_same_bags = torch.equal(self.lengths[key], planned[feature, : self.num_examples])
                if is_same_bags and torch.equal(self.ids[own], ids[batch]):  # not if they are of other sizes
                    found.add(feature)
        return found


def _is_other(own: Tensor, batch: Tensor, spans: Iterable[tuple[int, int, int]]) -> bool:
    """Whether contiguous tensors of one dtype differ in a span: its start in each, and its size."""
    mine, theirs, width = own.data_ptr(), batch.data_ptr(), own.itemsize
    return any(_memcmp(mine + width * at, theirs + width * there, width * size) for at, there, size in spans)


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.is_contiguous()


def _misfit(order: KeyOrder, lengths: Tensor, ids: Tensor, num_examples: int) -> InputError:
    return InputError(
        f"embedding input has {lengths.numel()} lengths for {len(order.names)} keys and {num_examples} examples, "
        f"which add up to {int(lengths.sum())}, but {ids.numel()} ids"
    )


def is_same_memory(inputs: JaggedInput, context: BatchContext) -> bool:
    """Whether an input is the batch's own tensors. The caller knows that these have not changed."""
    pairs = (inputs.values(), context.ids), (inputs.lengths(), context.bags)
    return all(
        own.data_ptr() == planned.data_ptr() and own.shape == planned.shape and own.dtype == planned.dtype
        for own, planned in pairs
    )


def differs(inputs: JaggedInput, context: BatchContext, order: KeyOrder, starts: Sequence[int]) -> Tensor:
    """bool scalar on the device: the input has other ids or bags than the batch. The host waits for nothing.

    Args:
        inputs: has as many ids of each feature as the batch.
        context: of the batch.
        order: of its keys.
        starts: by key, the start of its ids in the input.
    """
    num_examples, planned = inputs.stride(), context.feature_starts
    ids = as_int64(inputs.values().detach(), f"ids of keys {order.names}")
    lengths = inputs.lengths().detach().view(len(order.names), num_examples)
    bags = context.bags.view(len(planned) - 1, context.num_examples)[:, :num_examples]
    # Bags of all features: where they are as planned, the ids of each begin where they should.
    own_bags = _cut(lengths, [(key, count) for key, _, count in order.runs])
    batch_bags = _cut(bags, [(feature, count) for _, feature, count in order.runs])
    sizes = [planned[feature + count] - planned[feature] for _, feature, count in order.needed]
    own_ids = _cut(ids, zip([starts[run.key] for run in order.needed], sizes, strict=True))
    batch_ids = _cut(context.ids, zip([planned[run.feature] for run in order.needed], sizes, strict=True))
    return torch.stack([own_ids.ne(batch_ids).any(), own_bags.ne(batch_bags).any()]).any()


def _cut(tensor: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """The given spans (start, size) of the first dimension, joined."""
    parts = [tensor.narrow(0, start, size) for start, size in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
