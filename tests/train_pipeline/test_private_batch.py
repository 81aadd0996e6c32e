"""Batches in shared memory are copied into private memory, whatever they are made of; the user's objects stay."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor

from bagpipe.train_pipeline import private_batch
from bagpipe.train_pipeline.batch_graph import Leaves
from bagpipe.train_pipeline.private_batch import PrivateMemory, is_shared
from tests.train_pipeline.test_batch_graph import CONTAINERS, Names, One, Pair, Two


def _private(batch: Any) -> Any:
    return PrivateMemory().of(batch, Leaves(batch))[0]


def _share(tensor: Tensor) -> Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _shared(*values: float) -> Tensor:
    return _share(torch.tensor(values))


@pytest.mark.parametrize("outer", CONTAINERS)
@pytest.mark.parametrize("inner", CONTAINERS)
def test_containers_with_a_shared_tensor_are_copied(outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> None:
    tensor, other = _shared(1, 2), [torch.ones(1)]
    batch = {"mine": outer(inner(tensor)), "other": other}
    private = _private(batch)
    assert private is not batch
    assert private["other"] is other
    assert type(private["mine"]) is type(batch["mine"])
    assert not any(map(is_shared, Leaves(private).tensors))
    assert [each.tolist() for each in Leaves(private["mine"]).tensors] == [[1, 2]]
    assert is_shared(tensor)
    assert [id(each) for each in Leaves(batch["mine"]).tensors] == [id(tensor)]


@pytest.mark.parametrize("batch", [torch.ones(2), {"x": [torch.ones(1)]}, Two(3), SimpleNamespace(x=torch.ones(1))])
def test_a_batch_in_private_memory_is_held_as_it_is(batch: Any) -> None:
    assert _private(batch) is batch


def test_keyed_jagged_tensors_keep_all_they_know() -> None:
    ids = KeyedJaggedTensor(
        keys=["a", "b"],
        values=_share(torch.tensor([1, 2, 3])),
        lengths=_share(torch.tensor([1, 0, 1, 1])),
        weights=_shared(0.5, 1.5, 2.5),
    )
    ids.length_per_key()
    ids.offsets()
    single = JaggedTensor(values=_shared(1, 2), lengths=_share(torch.tensor([2, 0])))
    batch = {"ids": ids, "again": ids, "single": single}
    private = _private(batch)
    mine = private["ids"]
    assert mine is private["again"]
    assert (mine.keys(), mine.stride(), mine.length_per_key()) == (["a", "b"], 2, [1, 2])
    for own, theirs in (
        (mine.values(), ids.values()),
        (mine.lengths(), ids.lengths()),
        (mine.offsets(), ids.offsets()),
        (mine.weights(), ids.weights()),
        (private["single"].values(), single.values()),
    ):
        assert torch.equal(own, theirs)
        assert not is_shared(own)
    assert is_shared(ids.values())


def test_tensors_of_one_storage_share_its_copy_and_of_a_large_one_only_the_part_is_copied() -> None:
    whole, large = _share(torch.arange(8.0)), _share(torch.arange(1000.0))
    private = _private([whole, whole[2:6], whole.view(2, 4).T, large[10:13], large[::500], whole])
    assert private[0] is private[5]
    assert private[0].data_ptr() + 8 == private[1].data_ptr()
    assert private[2].stride() == (1, 4)
    assert private[2].data_ptr() == private[0].data_ptr()
    assert [each.tolist() for each in private[1:5]] == [
        [2, 3, 4, 5],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [10, 11, 12],
        [0, 500],
    ]
    assert sum(each.untyped_storage().nbytes() for each in private[3:5]) < 100
    assert not any(map(is_shared, private))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_of_other_layouts_are_copied() -> None:
    coo = torch.sparse_coo_tensor(_share(torch.tensor([[0, 2]])), _shared(1, 2), (3,), check_invariants=False)
    csr = torch.sparse_csr_tensor(
        _share(torch.tensor([0, 1])), _share(torch.tensor([1])), _shared(4), (1, 3),
        check_invariants=False,
    )  # fmt: skip
    offsets = _share(torch.tensor([0, 1, 3]))
    jagged, other = (torch.nested.nested_tensor_from_jagged(_shared(1.0, 2.0, n), offsets=offsets) for n in (3.0, 4.0))
    batch = [coo, csr, jagged, other, _share(torch.empty(0))]
    private = _private(batch)
    assert all(map(is_shared, batch))
    assert not any(map(is_shared, private))
    assert torch.equal(private[0].to_dense(), coo.to_dense())
    assert torch.equal(private[1].to_dense(), csr.to_dense())
    assert (private[2] + private[3]).values().tolist() == [2, 4, 7]


class Unwilling:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __copy__(self) -> Any:
        return self


class Child:
    """Knows its parent without holding it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.parent = tensor, weakref.ref(tensor)


@pytest.mark.parametrize(
    "batch",
    [
        [Unwilling(_shared(1))],
        Child(_shared(1)),
        MappingProxyType({"x": _shared(1)}),
        [_shared(1.0).requires_grad_(), torch.nn.Parameter(_shared(1.0), requires_grad=False)],
    ],
)
def test_what_cannot_be_copied_is_held_as_it_came(batch: Any) -> None:
    assert _private(batch) is batch


class Node:
    def __init__(self, parent: Node | None, tensor: Tensor | None = None) -> None:
        self.parent, self.tensor = parent, tensor
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)


def test_objects_in_a_circle_are_copied_together() -> None:
    root = Node(None)
    one, two, loose = Node(root, _shared(1)), Node(root), Node(None)
    Node(loose)
    private = _private({"root": root, "nodes": (one, two), "loose": loose, "lock": threading.Lock()})
    mine = private["root"]
    assert [child.parent for child in mine.children] == [mine, mine]
    assert private["nodes"] == tuple(mine.children)
    assert [is_shared(each) for each in Leaves(private).tensors] == [False]
    assert private["loose"] is loose
    assert one.parent is root
    assert root.children == [one, two]
    assert one.tensor is not None
    assert is_shared(one.tensor)


@pytest.mark.parametrize("order", [1, -1])
def test_long_chains_are_copied(order: int) -> None:
    nodes: list[Node] = [Node(None, _shared(7))]
    for _ in range(3000):
        nodes.append(Node(None))
        nodes[-1].parent = nodes[-2]
    private = _private(nodes[::order])
    assert not any(map(is_shared, Leaves(private).tensors))
    assert all(one is not other for one, other in zip(private, nodes[::order], strict=True))
    assert private[0 if order < 0 else 1].parent is private[1 if order < 0 else 0]


def test_a_tuple_in_a_circle_is_copied() -> None:
    holder: list[Any] = []
    circle = (holder, _shared(1))
    holder.append((circle,))
    private = _private(circle)
    assert private[0][0][0] is private
    assert not is_shared(private[1])
    assert holder[0][0] is circle


def test_memory_of_earlier_batches_is_not_copied() -> None:
    """Such as a table that each batch refers to, or the data that batches are cut from."""
    table, memory = _shared(1, 2, 3), PrivateMemory()
    batches = [{"table": table, "x": _shared(n), "cut": table[n : n + 1]} for n in range(3)]
    private = [memory.of(batch, Leaves(batch))[0] for batch in batches]
    assert [is_shared(each["x"]) for each in private] == [False] * 3
    assert [is_shared(each["cut"]) for each in private] == [False, True, True]
    assert [each["table"] is table for each in private] == [False, True, True]
    assert [each["cut"].tolist() for each in private] == [[1], [2], [3]]


def test_large_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_batch, "_MAX_BYTES", 16)
    large = _shared(1, 2, 3)
    private = _private([large, large[1:], _shared(1)])
    assert private[0] is large
    assert [is_shared(each) for each in private] == [True, False, False]


def test_storages_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PrivateMemory()
    for _ in range(30):
        batch = [_share(torch.empty(1)) for _ in range(100)]
        memory.of(batch, Leaves(batch))
    assert len(memory._seen) <= 1100


def test_arrays_in_mapped_memory_are_copied(tmp_path: Path) -> None:
    """Each file of numpy that is mapped takes a descriptor; one that many batches are cut from takes one."""
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(4) + number)
    whole, memory = np.load(tmp_path / "0.npy", mmap_mode="r"), PrivateMemory()
    before = len(os.listdir("/proc/self/fd"))
    for number in (1, 2):
        batch = {"own": np.load(tmp_path / f"{number}.npy", mmap_mode="r")[1:], "cut": whole[number:], "x": np.ones(2)}
        private = memory.of(batch, Leaves(batch))[0]
        assert private["own"].tolist() == [number + 1, number + 2, number + 3]
        assert private["cut"].tolist() == whole[number:].tolist()
        assert private["x"] is batch["x"]
        assert (private["cut"] is batch["cut"]) == (number == 2)
        del batch
        assert len(os.listdir("/proc/self/fd")) == before


class Tagged(Tensor):
    pass


def test_tensors_keep_their_types_and_attributes() -> None:
    tagged, plain = _shared(1).as_subclass(Tagged), _shared(2)
    tagged.tag = plain.tag = "mine"  # type: ignore[attr-defined]
    conjugate = _share(torch.tensor([1 + 2j])).conj()
    private = _private([tagged, plain, conjugate])
    assert [type(each) for each in private] == [Tagged, Tensor, Tensor]
    assert [each.tag for each in private[:2]] == ["mine", "mine"]
    assert private[2].tolist() == [1 - 2j]
    assert not any(map(is_shared, private))


def test_subclasses_and_order_are_kept() -> None:
    private = _private(OrderedDict(b=Names([_shared(1), "x"]), a=Pair(One(_shared(2)), 3)))
    assert list(private) == ["b", "a"]
    assert type(private["b"]) is Names
    assert private["b"][1] == "x"
    assert private["a"].first.only.tolist() == [2]
    assert copy.copy(private["a"]) == private["a"]
