"""`TensorFile`, `TensorFileWriter`: safetensors files of any size, mapped for reading and written piece by piece.

    offset 0   length of the header, uint64         8 B
           8   JSON: name -> dtype, shape, begin and end of its bytes behind the header; then spaces
           …   the tensors, widest words first, by name: every one is aligned to its words

Only numpy: a server of scores needs no package for its rows. Equal tensors and metadata give equal files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json

__all__ = ["WORDS", "TensorFile", "TensorFileWriter", "TensorSpec", "checksum_of"]

#: dtypes of the format -> little-endian numpy words. numpy has no bfloat16; half words are opaque bits.
WORDS: Mapping[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<u2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
#: Bytes hashed or copied at a time.
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype (a key of `WORDS`) and shape of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(WORDS[self.dtype]).itemsize


class TensorFile:
    """A safetensors file whose tensors are mapped, not read. Usable by several threads, also after its removal.

    Args:
        path: of the file.

    Attributes:
        specs: by name, in the order of the file.
        metadata: strings by name.

    Raises:
        InputError: the file cannot be read, or is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        try:
            num_bytes = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                is_whole = length <= _MAX_HEADER_BYTES and 8 + length <= num_bytes
                header = parse_json(file.read(length)) if is_whole else None
            self._data = np.memmap(path, np.uint8, "r", 8 + length) if num_bytes > 8 + length else np.empty(0, np.uint8)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(header, dict):
            raise InputError(f"{path}: expected a whole safetensors file, got {num_bytes} bytes of something else")
        self.metadata: Mapping[str, str] = header.pop(_METADATA, {})
        self.specs: dict[str, TensorSpec] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        end_of_file = 0
        try:
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                spec = TensorSpec(name=name, dtype=entry["dtype"], shape=tuple(map(int, entry["shape"])))
                first, end = map(int, entry["data_offsets"])
                if first != end_of_file or end - first != spec.num_bytes or min(spec.shape, default=0) < 0:
                    raise InputError(f"{path}: tensor {name!r} has bytes {first} to {end}, which are not its own")
                self.specs[name], self._spans[name], end_of_file = spec, (first, end), end
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: a header that is not of safetensors: {error}") from None
        if end_of_file != len(self._data):
            raise InputError(f"{path}: expected {end_of_file} bytes of tensors, got {len(self._data)}")

    def words(self, name: str) -> NDArray[Any]:
        """The words of a tensor, in its shape; mapped and read-only. KeyError if there is none of that name."""
        first, end = self._spans[name]
        spec = self.specs[name]
        return self._data[first:end].view(WORDS[spec.dtype]).reshape(spec.shape)


class TensorFileWriter:
    """Context manager that writes a safetensors file, tensor by tensor in any order.

    Args:
        path: of the new file.
        specs: all tensors.
        metadata: strings by name.

    Attributes:
        num_bytes: length of the file.
        checksums: SHA-256 of each tensor's bytes, hexadecimal, by name; of those written.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> None:
        self.checksums: dict[str, str] = {}
        self._path = path
        ordered = sorted(specs, key=lambda spec: (-np.dtype(WORDS[spec.dtype]).itemsize, spec.name))
        self._specs = {spec.name: spec for spec in ordered}
        header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
        self._offsets: dict[str, int] = {}
        end = 0
        for spec in ordered:
            self._offsets[spec.name] = end
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": spec.shape,
                "data_offsets": (end, end + spec.num_bytes),
            }
            end += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % 8)
        self.num_bytes = 8 + len(self._header) + end
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        self._file.write(len(self._header).to_bytes(8, "little") + self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file, self._file = self._file, None
        assert file is not None, "entered"
        file.close()
        assert kind is not None or self.checksums.keys() == self._specs.keys(), "every tensor is written"

    def write(self, name: str, words: NDArray[Any]) -> None:
        """Write a tensor's words, whose shape is that of its spec. Raises OSError if the disk is full."""
        spec, file = self._specs[name], self._file
        assert file is not None, "entered"
        assert words.shape == spec.shape, f"{name}: {words.shape} is not {spec.shape}"
        assert words.dtype == np.dtype(WORDS[spec.dtype]), f"{name}: {words.dtype} is not {spec.dtype}"
        file.seek(8 + len(self._header) + self._offsets[name])
        hasher = hashlib.sha256()
        for part in _parts(words):
            hasher.update(part)
            file.write(part)
        self.checksums[name] = hasher.hexdigest()


def checksum_of(words: NDArray[Any]) -> str:
    """SHA-256 of a tensor's bytes, hexadecimal."""
    hasher = hashlib.sha256()
    for part in _parts(words):
        hasher.update(part)
    return hasher.hexdigest()


def _parts(words: NDArray[Any]) -> list[memoryview]:
    """The bytes of an array, in pieces; copies an array that is not contiguous."""
    data = np.ascontiguousarray(words).reshape(-1).view(np.uint8).data
    return [data[first : first + _CHUNK_BYTES] for first in range(0, len(data), _CHUNK_BYTES)]
