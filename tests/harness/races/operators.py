"""`accesses`: memory that an operator reads and writes, from its schema and its arguments.

schema: ``copy_(Tensor(a!) self, Tensor src)``     self is written, src is read
        ``view(Tensor(a) self, …) -> Tensor(a)``   an alias of the same memory: no access
        ``add(Tensor self, …) -> Tensor``          the result is new memory, written

Operators that index rows (`_ROWS`) touch only those rows: lanes use different slots of one slab concurrently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Access", "accesses", "waits_for_device"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Access:
    """An access of one tensor by one operator.

    Attributes:
        tensor: the tensor.
        writes: whether it is written.
        rows: indices of the rows, int ``[n]``; None: the whole tensor.
        is_result: the operator created the tensor.
    """

    tensor: Tensor
    writes: bool
    rows: Tensor | None = None
    is_result: bool = False


#: Operators that allocate tensors without writing them.
_EMPTY = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted)?$")

#: Operators that use only the shapes of their tensor arguments.
_FACTORIES = re.compile(r"aten::(new_.*|.*_like)$")

#: Operator -> (argument indexed by rows, argument with the row indices); if it has a ``dim``, that is 0.
_ROWS: Mapping[str, tuple[str, str]] = {
    "aten::index_select": ("self", "index"),
    "aten::index_copy_": ("self", "index"),
    "aten::index_add_": ("self", "index"),
    "aten::index_fill_": ("self", "index"),
    "aten::embedding": ("weight", "indices"),
    "aten::_embedding_bag": ("weight", "indices"),
    "aten::_embedding_bag_forward_only": ("weight", "indices"),
    "aten::index": ("self", "indices"),
    "aten::index_put_": ("self", "indices"),
}

#: Operators whose result, or its shape, the host needs: the thread waits for its stream.
_WAITING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim",
        "unique_consecutive", "bincount", "repeat_interleave",
    )
)  # fmt: skip


def waits_for_device(operator: str) -> bool:
    """Whether the calling thread waits on a CUDA device (``aten::item``)."""
    return operator in _WAITING


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument that can hold tensors: name, position and kind of access."""

    name: str
    position: int
    writes: bool


@dataclass(frozen=True, slots=True)
class _Signature:
    """Parsed schema.

    Attributes:
        arguments: those read, then those written.
        new: positions of results that are new memory.
        fills: whether new memory is written.
        rows_of, numbers_of: see `_ROWS`.
    """

    arguments: tuple[_Argument, ...]
    new: tuple[int, ...]
    fills: bool
    num_results: int
    rows_of: str
    numbers_of: str


@cache
def _signature(operator: Any) -> _Signature:
    schema = operator._schema
    is_factory = _FACTORIES.match(schema.name) is not None
    reads, writes = [], []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes.append(_Argument(argument.name, position, True))
        elif alias is None and not is_factory and "Tensor" in str(argument.type):
            reads.append(_Argument(argument.name, position, False))
    rows_of, numbers_of = _ROWS.get(schema.name, ("", ""))
    return _Signature(
        arguments=(*reads, *writes),
        new=tuple(number for number, returned in enumerate(schema.returns) if returned.alias_info is None),
        fills=_EMPTY.match(schema.name) is None,
        num_results=len(schema.returns),
        rows_of=rows_of,
        numbers_of=numbers_of,
    )


def accesses(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Iterator[Access]:
    """Accesses of an operator call, reads before writes.

    Args:
        operator: a `torch._ops.OpOverload`.
        args, kwargs: of the call.
        result: of the call.
    """
    signature = _signature(operator)
    numbers = _numbers(operator, signature, args, kwargs) if signature.rows_of else None
    for argument in signature.arguments:
        rows = numbers if argument.name == signature.rows_of else None
        for tensor in _tensors(_value(argument.name, argument.position, args, kwargs)):
            yield Access(tensor=tensor, writes=argument.writes, rows=rows)
    for number in signature.new:
        value = result if signature.num_results == 1 else result[number]
        for tensor in _tensors(value):
            yield Access(tensor=tensor, writes=signature.fills, is_result=True)


def _value(name: str, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _numbers(operator: Any, signature: _Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Row indices used; None: all rows."""
    given = {
        argument.name: _value(argument.name, position, args, kwargs)
        for position, argument in enumerate(operator._schema.arguments)
    }
    numbers = given[signature.numbers_of]
    if isinstance(numbers, (list, tuple)):  # x[i, j]: only the first index selects rows
        numbers = numbers[0] if numbers else None
    is_number = isinstance(numbers, Tensor) and numbers.dtype in (torch.int32, torch.int64)
    return numbers if is_number and given.get("dim", 0) in (0, -given[signature.rows_of].dim()) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
