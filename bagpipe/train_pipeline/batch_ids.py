"""`BatchIds`: finds the ids of a model's features in the user's batches.

    a dataclass, dict, tuple, object … ──KeyedJaggedTensors in it──> Batch: ids and lengths, by feature

A `Batch` made here has ids only: no dense columns, and zeros for labels. One KeyedJaggedTensor with exactly the model's
features in their order is taken without a copy; others are put in order. Where they have different numbers of examples,
such as candidates beside their requests, the shorter ones are filled up with examples without ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bagpipe.embedding.cached_lookup import JaggedInput
from bagpipe.embedding.integer_ids import as_int64
from bagpipe.errors import InputError
from bagpipe.train_pipeline.batch_graph import Leaves
from bagpipe.types.batch import Batch

__all__ = ["BatchIds", "hash_of"]


class BatchIds:
    """Makes the planner's batches.

    Args:
        features: names of the model's features, in the order of the planner's batches.
        sparse: gives a batch's KeyedJaggedTensor, or several; None: they are searched for.
    """

    def __init__(self, features: Sequence[str], sparse: Callable[[Any], Any] | None = None) -> None:
        self._features = tuple(features)
        self._names = frozenset(features)
        self._sparse = sparse

    def of(self, batch: Any, index: int, leaves: Leaves | None = None) -> Batch:
        """The ids of a batch.

        Args:
            batch: the user's batch. Its tensors must not change any more.
            index: its number.
            leaves: what is in it; None: it is searched here.

        Raises:
            InputError: the batch has no KeyedJaggedTensor, lacks a feature, has one twice with different ids, or has
                variable strides.
        """
        if self._sparse is not None:
            leaves = Leaves(self._sparse(batch))
        found = (Leaves(batch) if leaves is None else leaves).jagged
        if not found:
            raise InputError(
                f"batch {index}: expected KeyedJaggedTensors in it, found none in a {type(batch).__name__}; "
                "sparse=function can give those of a batch"
            )
        jagged = [part for part in found if not self._names.isdisjoint(part.keys())]
        if not jagged:
            raise self._lacking(self._features, [key for part in found for key in list(part.keys())], index)
        num_examples = self._num_examples(jagged, index)
        first = jagged[0]
        if len(jagged) == 1 and tuple(first.keys()) == self._features:
            values, lengths = _parts(first, index)
        else:
            values, lengths = self._in_order(jagged, num_examples, index)
        return Batch(
            index=index,
            dense=np.empty((num_examples, 0), dtype=np.float32),
            values=values,
            lengths=lengths,
            labels=np.zeros(num_examples, dtype=np.float32),
        )

    def _num_examples(self, jagged: Sequence[JaggedInput], index: int) -> int:
        """The largest number of examples."""
        for part in jagged:
            if part.variable_stride_per_key():
                raise InputError(
                    f"batch {index}: expected the same number of examples for every key of a KeyedJaggedTensor, got "
                    f"one with variable strides (keys {part.keys()})"
                )
        return max(part.stride() for part in jagged)

    def _in_order(
        self, jagged: Sequence[JaggedInput], num_examples: int, index: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Values and lengths of the model's features, from any keys in any order."""
        found: dict[str, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
        for part in jagged:
            values, lengths = _parts(part, index)
            if not self._names.issuperset(part.keys()):
                part.length_per_key()  # kept by it: otherwise the model's collections would wait for a device
            lengths = np.pad(lengths, ((0, 0), (0, num_examples - lengths.shape[1])))
            ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64)).tolist()
            for key, start, end, bags in zip(part.keys(), [0, *ends], ends, lengths, strict=False):
                if key not in self._names:
                    continue
                if key in found and not _is_same(found[key], (values[start:end], bags)):
                    raise InputError(
                        f"batch {index}: key {key!r} is there twice, with different ids: give them two names, or "
                        "choose with sparse=function"
                    )
                found[key] = values[start:end], bags
        lacking = [name for name in self._features if name not in found]
        if lacking:
            raise self._lacking(lacking, found, index)
        parts = [found[name] for name in self._features]
        return np.concatenate([ids for ids, _ in parts]), np.stack([bags for _, bags in parts])

    def _lacking(self, lacking: Sequence[str], keys: Iterable[str], index: int) -> InputError:
        return InputError(f"batch {index}: the model's feature {lacking[0]!r} is missing, it has {sorted(keys)}")


def hash_of(batch: Batch) -> str:
    """Hash of a batch's ids and their distribution over features and examples: 16 hexadecimal digits of XXH3."""
    hasher = xxhash.xxh3_64(repr(batch.lengths.shape).encode())
    for array in (batch.lengths, batch.values):
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


def _parts(part: JaggedInput, index: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Ids ``[n]`` and lengths ``[keys, examples]`` of a KeyedJaggedTensor."""
    values = as_int64(part.values().detach().cpu(), f"batch {index}: ids of keys {part.keys()}")
    ids: NDArray[np.int64] = values.contiguous().numpy()
    sizes: NDArray[np.int32] = part.lengths().detach().cpu().to(torch.int32).contiguous().numpy()
    if int(sizes.sum(dtype=np.int64)) != len(ids):
        raise InputError(f"batch {index}: lengths add up to {sizes.sum()}, but there are {len(ids)} ids")
    return ids, sizes.reshape(len(part.keys()), part.stride())


def _is_same(
    one: tuple[NDArray[np.int64], NDArray[np.int32]], other: tuple[NDArray[np.int64], NDArray[np.int32]]
) -> bool:
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
