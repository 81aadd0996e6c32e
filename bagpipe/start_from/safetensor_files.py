"""`SafetensorFiles`: the tensors of safetensors files, read in slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bagpipe.errors import InputError
from bagpipe.util.utf8_path import utf8_path

__all__ = ["SafetensorFiles"]

#: Dtypes by their names in the files.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class SafetensorFiles:
    """See `bagpipe.start_from.tensor_source.TensorFiles`.

    Args:
        paths: of the files. A name that occurs twice is that of the first file.

    Raises:
        InputError: a file cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        outline: dict[str, Tensor] = {}
        for path in paths:
            with _opened(path) as file:
                names = file.keys()
                for name in names:
                    part = file.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if name not in outline and dtype is not None:
                        outline[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                        self._paths[name] = path
        self.outline: Mapping[str, Tensor] = outline

    def tensor(self, name: str) -> Tensor:
        with _opened(self._paths[name]) as file:
            found: Tensor = file.get_tensor(name)
        return found

    def rows(self, name: str) -> _Rows:
        return _Rows(self._paths[name], name)


class _Rows:
    """Slices of one tensor. A context manager."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._slice = self._stack.enter_context(_opened(self._path)).get_slice(self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, first: int, end: int) -> Tensor:
        part: Tensor = self._slice[first:end]
        return part


def _opened(path: Path) -> Any:
    try:
        with utf8_path(path) as readable:
            return safe_open(readable, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}") from None
