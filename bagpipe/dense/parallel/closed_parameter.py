"""Parameters whose values are elsewhere: any use is one clear error, and no memory is read that was freed.

    close, open_again   functions that read the values of a closed parameter raise InputError
    absent              stands in for the values: shape, dtype and device, and NaN wherever something reads it
    Left                storages that were let go of: a view that lives on shows that something could read old values

A closed parameter is the same object of another class, so every name that the model has for it is closed. Shapes,
dtypes and gradients can be asked for. Open parameters cost nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bagpipe.errors import InputError

__all__ = ["OUTSIDE", "Left", "absent", "close", "open_again", "tensors_in"]

#: Where a parameter is used that is not here.
OUTSIDE = (
    "dense.shard parameters: a parameter is used outside the forward of its layer: name in dense.wrap a module whose "
    "forward has all of its uses"
)

#: Functions that read no values of a parameter: attributes, shapes, dtypes, tensors like it.
_WITHOUT_VALUES = frozenset(
    [
        "__get__",
        "__set__",
        "__hash__",
        "__len__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "is_contiguous",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "data_ptr",
        "untyped_storage",
        "storage_offset",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
    ]
)
#: Functions that take a parameter as an example of a dtype and device, if it is not their first argument.
_LIKE_ANOTHER = frozenset(["to", "type_as", "expand_as", "view_as", "reshape_as"])
#: Attributes with values.
_VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")
#: Attempts to see a storage go, and seconds between them: an exchange's thread lets go of it just after its end.
_ATTEMPTS = 100
_PAUSE_S = 0.02


class _Closed(nn.Parameter):
    """See the module.

    Attributes:
        opened: class of the parameter when it is open.
    """

    opened: Any = nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_harmless(func, args):
            raise InputError(OUTSIDE)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _is_harmless(func: Any, args: tuple[Any, ...]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return not any(func == getattr(torch.Tensor, value).__get__ for value in _VALUES)
    if name in _LIKE_ANOTHER:
        return not isinstance(args[0], _Closed)
    return name in _WITHOUT_VALUES


@cache
def _closed_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of closed parameters of a class."""
    return _Closed if kind is nn.Parameter else type(f"Closed{kind.__name__}", (_Closed, kind), {"opened": kind})


def close(parameter: nn.Parameter) -> None:
    """Refuse uses of its values. Idempotent."""
    if not isinstance(parameter, _Closed):
        parameter.__class__ = _closed_class(type(parameter))


def open_again(parameter: nn.Parameter) -> None:
    """Allow uses of its values. Idempotent."""
    if isinstance(parameter, _Closed):
        parameter.__class__ = type(parameter).opened


def absent(parameter: nn.Parameter) -> Tensor:
    """A stand-in for the values of a parameter: its shape, with one NaN of memory."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


class Left:
    """Storages on the host that were let go of. Views of them keep what will be old values."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []

    def add(self, tensor: Tensor) -> None:
        """The caller lets go of a tensor; on a device its values become NaN, because exchanges may keep it a while."""
        if tensor.is_cuda:
            tensor.fill_(torch.nan)
        else:
            self._storages.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def are_held(self) -> bool:
        """Whether a view lives on. Later calls do not ask for the same storages again."""
        left, self._storages = self._storages, []
        for attempt in range(_ATTEMPTS):
            left = [storage for storage in left if not storage.expired()]  # type: ignore[no-untyped-call]
            if not left:
                return False
            if attempt == 0:
                gc.collect()
            else:
                threading.Event().wait(_PAUSE_S)
        return True


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors in a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
