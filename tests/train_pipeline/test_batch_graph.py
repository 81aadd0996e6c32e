"""`Leaves`: all tensors, arrays and KeyedJaggedTensors, in any containers; long lists and graphs cost little."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import JaggedTensor, KeyedJaggedTensor

from bagpipe.train_pipeline import batch_graph
from bagpipe.train_pipeline.batch_graph import MAX_DEPTH, Leaves

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Two:
    first: Any
    second: Any = 7


@dataclass(frozen=True, slots=True)
class One:
    only: Any


class Slots:
    __slots__ = ("__dict__", "leaf", "unset")

    def __init__(self, leaf: Any) -> None:
        self.leaf, self.text = leaf, "text"


class Names(list):  # type: ignore[type-arg]
    pass


class Wrapped:
    """Has the methods of what it wraps."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def _jagged() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.tensor([1]), lengths=torch.tensor([1]))


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda leaf: {"x": "text", "leaf": leaf},
    lambda leaf: OrderedDict(leaf=leaf),
    lambda leaf: (1, leaf),
    lambda leaf: [*range(100), leaf],
    lambda leaf: Pair("text", leaf),
    lambda leaf: Names([leaf]),
    Two,
    One,
    lambda leaf: SimpleNamespace(x=3.5, leaf=leaf),
    lambda leaf: deque(["text", leaf]),
    Slots,
]


@pytest.mark.parametrize("outer", CONTAINERS)
@pytest.mark.parametrize("inner", CONTAINERS)
def test_leaves_are_found_in_all_containers(outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> None:
    tensor, array, jagged = torch.ones(2), np.ones(2), _jagged()
    batch = [outer(inner(tensor)), outer(inner(array)), inner(outer(jagged)), tensor, jagged]
    found = Leaves(batch)
    assert [id(each) for each in found.tensors] == [id(tensor)]
    assert [id(each) for each in found.arrays] == [id(array)]
    assert [id(each) for each in found.jagged] == [id(jagged)]


@pytest.mark.parametrize("batch", [torch.ones(1), np.ones(1), _jagged(), Wrapped(_jagged()), "text", None, 3])
def test_a_batch_can_be_a_leaf(batch: Any) -> None:
    found = Leaves(batch)
    leaves = [*found.tensors, *found.arrays, *found.jagged]
    assert [id(leaf) for leaf in leaves] == ([] if isinstance(batch, (str, int, type(None))) else [id(batch)])


def test_jagged_tensors_of_one_key_are_objects_with_tensors() -> None:
    found = Leaves({"a": JaggedTensor(values=torch.ones(3), lengths=torch.tensor([1, 2]))})
    assert not found.jagged
    assert len(found.tensors) >= 2


def test_containers_are_searched_to_a_depth() -> None:
    nested: Any = torch.ones(1)
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert len(Leaves([nested]).tensors) == 1
    assert not Leaves([[nested]]).tensors
    assert len(Leaves([[nested], nested]).tensors) == 1  # by the shorter way


class Node:
    """A node of a graph whose nodes know one another."""

    def __init__(self, name: str, graph: list[Node]) -> None:
        self.name, self.graph, self.score = name, graph, 0.5
        graph.append(self)


def _calls(search: Callable[[], Any]) -> int:
    """Calls of functions of Python."""
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        search()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("is_plain", [True, False])
def test_long_lists_and_graphs_are_searched_in_few_calls(is_plain: bool) -> None:
    """Each object is visited once, whoever refers to it, and no function is called for each."""
    graph: list[Node] = []
    for number in range(5000):
        Node(f"n{number}", graph)
    names = [f"request {number}" for number in range(5000)]
    tensor = torch.ones(1)
    batch = {"names": names, "points": [(n, str(n)) for n in range(5000)], "tensor": tensor}
    if not is_plain:
        batch["graph"] = graph
    found: list[Leaves] = []
    assert _calls(lambda: found.append(Leaves(batch))) < 500
    assert [id(each) for each in found[0].tensors] == [id(tensor)]


def test_values_beyond_the_bound_are_left_out_nearest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those equally near, members of short containers come first: ids behind a long list of names are found."""
    monkeypatch.setattr(batch_graph, "MAX_VALUES", 6)
    near, mine, far = torch.ones(1), torch.ones(1), [torch.ones(1) for _ in range(9)]
    found = Leaves({"far": far, "near": near, "mine": {"x": mine}})
    assert [id(each) for each in found.tensors[:2]] == [id(near), id(mine)]
    assert len(found.tensors) == 4
    assert len(Leaves((["name"] * 9, (near,), [[mine]])).tensors) == 1


class Lookup:
    """Attributes of a dictionary, whose own error tells that one is missing."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items = items

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["items"][name]


@dataclass
class Later:
    first: Any
    later: Any = field(init=False)


def test_objects_that_lack_attributes_are_searched() -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    found = Leaves([Lookup({"x": tensors[0]}), Later(tensors[1]), frozenset({3, "x"}), iter([1]), np, len, object()])
    assert {id(each) for each in found.tensors} == set(map(id, tensors))


def test_jagged_tensors_can_be_opened() -> None:
    jagged = _jagged()
    found = Leaves({"ids": jagged}, opens_jagged=True)
    assert not found.jagged
    assert {id(jagged.values()), id(jagged.lengths())} <= {id(each) for each in found.tensors}


def test_dataclasses_have_their_fields_only() -> None:
    two = Two(torch.ones(1))
    two.cache = torch.ones(1)  # type: ignore[attr-defined]
    assert [id(each) for each in Leaves(two).tensors] == [id(two.first)]
    assert [field.name for field in dataclasses.fields(two)] == ["first", "second"]
