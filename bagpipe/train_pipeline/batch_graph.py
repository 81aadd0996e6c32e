"""`Leaves`: the tensors, arrays and KeyedJaggedTensors in a user's batch, whatever containers and objects it has.

    batch ──containers, objects──> their members ──…──> leaves      level by level, at most `MAX_DEPTH` of them

A batch can carry long lists, such as the names of its requests, and whole graphs of objects. So each level is searched
type by type, in calls that loop in C where they can; numbers and texts are passed over in bulk; each object is visited
once; and `MAX_VALUES` members are looked at, the nearest first, and of these the ones of short containers.
"""

from __future__ import annotations

import copyreg
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, repeat
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, Literal

import numpy as np
import torch

from bagpipe.embedding.cached_lookup import JaggedInput

__all__ = ["IMMUTABLE", "MAX_DEPTH", "MAX_VALUES", "SEQUENCES", "Kind", "Leaves"]

#: Methods by which a KeyedJaggedTensor is recognised; torchrec is not imported.
_METHODS = ("keys", "values", "lengths", "stride", "variable_stride_per_key", "weights_or_none")
#: Nesting of containers that is searched.
MAX_DEPTH = 6
#: Members of containers that are looked at, numbers and texts among them.
MAX_VALUES = 1 << 18

#: Types without members that matter.
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), np.generic, type, ModuleType, FunctionType)
#: Containers whose members are given to their constructor, and all others but mappings.
IMMUTABLE = (tuple, AbstractSet)
SEQUENCES = (*IMMUTABLE, list, deque)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What values of one type are.

    Attributes:
        leaf: the list of `Leaves` that has them; "": they are none.
        may_be_jagged: some of them can be KeyedJaggedTensors, by methods that their type has not.
        members: the members of each of them, in their order; None: they have none that matter.
        names: attributes that are members.
        has_dict: the values of an instance's ``__dict__`` are members.
    """

    leaf: Literal["tensors", "arrays", "jagged", ""] = ""
    may_be_jagged: bool = False
    members: Callable[[list[Any]], list[Collection[Any]]] | None = None
    names: tuple[str, ...] = ()
    has_dict: bool = False

    def members_of(self, value: Any) -> Collection[Any]:
        """The members of one value."""
        return () if self.members is None else self.members([value])[0]


class Leaves:
    """What is found in a batch, each object once, nearest first.

    Args:
        batch: the batch.
        opens_jagged: KeyedJaggedTensors are searched as other objects are, for all tensors that they keep.

    Attributes:
        tensors, arrays: those outside of KeyedJaggedTensors.
        jagged: KeyedJaggedTensors; none if they are opened.
        containers: what has members: their kind, containers of one type, and the members of each.
    """

    __slots__ = ("arrays", "containers", "jagged", "tensors")

    def __init__(self, batch: Any, *, opens_jagged: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.jagged: list[JaggedInput] = []
        self.containers: list[tuple[Kind, list[Any], list[Collection[Any]]]] = []
        kind_of = _opened_kind if opens_jagged else _kind
        max_depth = MAX_DEPTH + 2 * opens_jagged  # some of those tensors are in dictionaries of theirs
        seen: dict[int, Any] = {}  # by id; held, so that no other object gets an id
        level, num_left = [batch], MAX_VALUES
        for depth in range(max_depth + 1):
            by_type: dict[type, list[Any]] = {}
            for key, value in {id(value): value for value in level}.items():
                if key not in seen:
                    seen[key] = value
                    by_type.setdefault(type(value), []).append(value)
            parts: list[Collection[Any]] = []
            for each, values in by_type.items():
                kind = kind_of(each)
                containers = self._keep(kind, values)
                if containers and kind.members is not None and depth < max_depth:
                    members = kind.members(containers)
                    self.containers.append((kind, containers, members))
                    parts += members
            if not parts:
                break
            if sum(map(len, parts)) > num_left:
                parts.sort(key=len)
            level = list(islice(chain.from_iterable(parts), num_left))
            num_left -= len(level)
            level = _without_plain(level)

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, and those of the KeyedJaggedTensors."""
        yield from self.tensors
        for jagged in self.jagged:
            weights = jagged.weights_or_none()
            yield jagged.values()
            yield jagged.lengths()
            if weights is not None:
                yield weights

    def _keep(self, kind: Kind, values: list[Any]) -> list[Any]:
        """Keep the leaves among values of one kind; returns the others."""
        if kind.leaf:
            getattr(self, kind.leaf).extend(values)
            return []
        if kind.may_be_jagged:
            jagged = [value for value in values if _is_jagged(value)]
            self.jagged += jagged
            return values if not jagged else [value for value in values if not _is_jagged(value)]
        if kind.has_dict and any(map(dict.__contains__, map(vars, values), repeat(_METHODS[0]))):
            return self._keep(replace(kind, may_be_jagged=True), values)
        return values


@lru_cache(maxsize=1024)
def _kind(kind: type) -> Kind:
    """What values of a type are."""
    found = _opened_kind(kind)
    if not found.names and not found.has_dict:
        return found
    if all(callable(getattr(kind, name, None)) for name in _METHODS):
        return Kind(leaf="jagged")
    return replace(found, may_be_jagged=hasattr(kind, "__getattr__"))  # by methods of what it wraps


@lru_cache(maxsize=1024)
def _opened_kind(kind: type) -> Kind:
    """What values of a type are, if KeyedJaggedTensors are objects as others."""
    if issubclass(kind, torch.Tensor):
        return Kind(leaf="tensors")
    if issubclass(kind, np.ndarray):
        return Kind(leaf="arrays")
    if issubclass(kind, _PLAIN):
        return Kind()
    if issubclass(kind, Mapping):
        return Kind(members=lambda values: [value.values() for value in values])
    if issubclass(kind, SEQUENCES):
        return Kind(members=lambda values: values)
    if dataclasses.is_dataclass(kind):
        names, has_dict = tuple(field.name for field in dataclasses.fields(kind)), False
    else:
        names, has_dict = tuple(copyreg._slotnames(kind)), kind.__dictoffset__ != 0  # type: ignore[attr-defined]
    members = _attributes_of(names, has_dict) if names or has_dict else None
    return Kind(members=members, names=names, has_dict=has_dict)


def _attributes_of(names: tuple[str, ...], has_dict: bool) -> Callable[[list[Any]], list[Collection[Any]]]:
    """A function that gives the attributes of objects of one type."""
    if not names:
        return lambda values: [vars(value).values() for value in values]

    def attributes(values: list[Any]) -> list[Collection[Any]]:
        found: list[Collection[Any]]
        try:
            found = list(map(get, values)) if len(names) > 1 else [(get(value),) for value in values]
        except AttributeError:  # some are not set
            found = [[getattr(value, name) for name in names if hasattr(value, name)] for value in values]
        if has_dict:
            found = [[*each, *vars(value).values()] for each, value in zip(found, values, strict=True)]
        return found

    get = attrgetter(*names)
    return attributes


def _is_jagged(value: Any) -> bool:
    """Whether a value is a KeyedJaggedTensor, by its methods."""
    try:
        return all(callable(getattr(value, name, None)) for name in _METHODS)
    except Exception:  # of a `__getattr__` that raises other errors for unknown names
        return False


def _is_plain(kind: type) -> bool:
    """Whether values of a type are numbers, texts or code: they have no members that matter."""
    found = _opened_kind(kind)
    return not found.leaf and found.members is None


def _without_plain(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    others = {kind for kind in kinds if not _is_plain(kind)}
    if len(others) == len(kinds):
        return values
    return [value for value in values if type(value) in others] if others else []
