"""Accesses of operators, compared with running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.races.operators import accesses, waits_for_device


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.entries: list[tuple[str, str, bool, list[int] | None]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if waits_for_device(func._schema.name):
            self.waits.append(func._schema.name)
        for access in accesses(func, args, kwargs or {}, result):
            name = "new" if access.is_result else self.names.get(access.tensor.untyped_storage()._cdata, "?")
            rows = None if access.rows is None else access.rows.tolist()
            self.entries.append((func._schema.name.removeprefix("aten::"), name, access.writes, rows))
        return result


def log_of(work: Callable[..., object], **tensors: Tensor) -> _Log:
    log = _Log({tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()})
    with log:
        work(**tensors)
    return log


ROWS = torch.tensor([2, 0])

CASES: Mapping[str, tuple[Callable[..., object], list[tuple[str, str, bool, list[int] | None]]]] = {
    "a result is new memory": (lambda x: x + x, [("add", "x", False, None), ("add", "x", False, None),
                                                 ("add", "new", True, None)]),
    "in place": (lambda x, y: x.copy_(y), [("copy_", "y", False, None), ("copy_", "x", True, None)]),
    "out": (lambda x, y: torch.add(y, y, out=x), [("add", "y", False, None), ("add", "y", False, None),
                                                  ("add", "x", True, None)]),
    "views are no accesses": (lambda x: x[1:].view(-1).detach(), []),
    "shapes only": (lambda x: torch.empty_like(x), [("empty_like", "new", False, None)]),
    "rows read": (lambda x: x.index_select(0, ROWS), [("index_select", "x", False, [2, 0]),
                                                      ("index_select", "?", False, None),
                                                      ("index_select", "new", True, None)]),
    "columns are all rows": (lambda x: x.index_select(1, ROWS[1:]), [("index_select", "x", False, None),
                                                                     ("index_select", "?", False, None),
                                                                     ("index_select", "new", True, None)]),
    "rows written": (lambda x, y: x.index_copy_(0, ROWS, y[:2]), [("index_copy_", "?", False, None),
                                                                  ("index_copy_", "y", False, None),
                                                                  ("index_copy_", "x", True, [2, 0])]),
    "lists": (lambda x, y: torch._foreach_add_([x], [y]), [("_foreach_add_", "y", False, None),
                                                           ("_foreach_add_", "x", True, None)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_accesses(name: str) -> None:
    work, expected = CASES[name]
    tensors = {"x": torch.ones(3, 2), "y": torch.ones(3, 2)}
    used = work.__code__.co_varnames
    assert log_of(work, **{key: tensor for key, tensor in tensors.items() if key in used}).entries == expected


def test_bags_read_only_their_rows() -> None:
    def work(x: Tensor) -> None:
        torch.embedding_bag(x, torch.tensor([1, 1, 2]), torch.tensor([0, 2, 3]), False, 0, False, None, True)

    assert ("_embedding_bag_forward_only", "x", False, [1, 1, 2]) in log_of(work, x=torch.ones(3, 2)).entries


def test_backward_operators_are_recorded() -> None:
    def work(x: Tensor) -> None:
        (x.requires_grad_() * 2).sum().backward()  # type: ignore[no-untyped-call]

    made = [name for name, tensor, *_ in log_of(work, x=torch.ones(3)).entries if tensor == "new"]
    assert made == ["mul", "sum", "ones_like", "mul"]


def test_item_waits_for_the_device() -> None:
    assert log_of(lambda x: float(x), x=torch.ones(())).waits == ["aten::_local_scalar_dense"]
    assert log_of(lambda x: x.nonzero(), x=torch.ones(2)).waits == ["aten::nonzero"]
    assert not log_of(lambda x: x * 2, x=torch.ones(2)).waits
