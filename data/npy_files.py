"""NumPy arrays in files: whole .npy files, and members of uncompressed .npz archives in place. Local ones are mapped.

    a.npy                         header, values
    a.npz  (zip, stored)          local header, [header, values] of member "0", local header, …
                                                         └── offset of the memory map

Nothing is read before it is used, and nothing is copied. A map stays valid while its file is not changed in place. Of
a remote file, rows are read as ranges of bytes (`RemoteArray`).
"""

from __future__ import annotations

import os
import struct
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.files.access import is_remote, open_file
from data.source import FileVersion, version_of

__all__ = ["Array", "RemoteArray", "map_array", "member_names"]

#: Fixed part of a zip's local header: signature, …, length of the name, length of the extra field.
_LOCAL = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteArray:
    """An array of a remote file whose rows lie one behind the other.

    Attributes:
        path: of the file.
        offset: of its first byte in the file.
        shape, dtype: as of a NumPy array.
    """

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Consecutive rows.

        Raises:
            InputError: they cannot be read.
        """
        start, stop, _ = rows.indices(self.shape[0])
        row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        try:
            with open_file(self.path) as file:
                file.seek(self.offset + start * row_bytes)
                content = file.read((stop - start) * row_bytes)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from None
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])


#: An array whose rows can be taken: ``array[start:stop]``.
Array = NDArray[Any] | RemoteArray


def map_array(path: str, member: str = "") -> Array:
    """The array of a .npy file, or of a member of an .npz file; read-only. Kept until the file changes.

    Raises:
        InputError: the file is missing, damaged, compressed, or holds objects.
    """
    return _map_cached(path, member, version_of(path))


def member_names(path: str) -> tuple[str, ...]:
    """Names of the arrays of an .npz file, without .npy, in its order.

    Raises:
        InputError: the file is missing or no zip archive.
    """
    return tuple(name.removesuffix(".npy") for name in _members(path, version_of(path)))


@lru_cache(maxsize=64)
def _members(path: str, version: FileVersion) -> dict[str, zipfile.ZipInfo]:
    del version  # part of the cache key only
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            return {item.filename: item for item in archive.infolist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{path}: expected a .npz archive: {error}") from None


@lru_cache(maxsize=4096)
def _map_cached(path: str, member: str, version: FileVersion) -> Array:
    where = f"{path}: array {member!r}" if member else path
    try:
        with open_file(path) as stream:
            if member:
                _seek(stream, where, _members(path, version).get(f"{member}.npy"))
            shape, is_fortran, dtype = _read_header(stream)
            offset = stream.tell()
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: expected a NumPy array: {' '.join(str(error).split())}") from None
    if dtype.hasobject:
        raise InputError(f"{where}: expected numbers, got Python objects")
    num_bytes = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if num_bytes > version.num_bytes:
        raise InputError(f"{where}: expected {num_bytes} bytes, got {version.num_bytes}: the file is cut short")
    if not all(shape):
        return np.zeros(shape, dtype)
    if is_remote(path):
        if is_fortran:
            raise InputError(f"{where}: expected rows one behind the other, got an array in Fortran's order: copy it")
        return RemoteArray(path=path, offset=offset, shape=shape, dtype=dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if is_fortran else "C")


def _seek(stream: BinaryIO, where: str, item: zipfile.ZipInfo | None) -> None:
    """Move to the content of an archive's member."""
    if item is None:
        raise InputError(f"{where}: the archive has no such array")
    if item.compress_type != zipfile.ZIP_STORED:
        raise InputError(f"{where}: expected an uncompressed archive, which can be mapped: write it with np.savez")
    stream.seek(item.header_offset)
    header = stream.read(_LOCAL.size)
    if len(header) < _LOCAL.size or not header.startswith(_SIGNATURE):
        raise InputError(f"{where}: the archive is damaged: expected a member at byte {item.header_offset}")
    _, name_bytes, extra_bytes = _LOCAL.unpack(header)
    stream.seek(name_bytes + extra_bytes, os.SEEK_CUR)


def _read_header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"format version {version[0]}.{version[1]} is not supported")
