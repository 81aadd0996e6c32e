"""`DcpFiles`: the tensors of a folder of torch.distributed.checkpoint (DCP), read shard by shard, without its planner.

    .metadata     a pickle: only the classes of DCP's own records are allowed (`_ALLOWED`), anything else is refused
    __R_N.distcp  one blob a shard, of torch.save: read with ``torch.load(weights_only=True)``

Nothing that a file names is ever called. A shard of a table is held in memory while its rows are read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from bagpipe.errors import InputError

__all__ = ["DcpFiles"]

_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
#: Names that a metadata file may have, by module. All are records, enumerations or constants.
_ALLOWED: Mapping[str, frozenset[str]] = {
    _METADATA: frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size", *_DTYPES}),
    "torch.serialization": frozenset({"_get_layout"}),  # a look-up of a layout by name
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}),
    "collections": frozenset({"OrderedDict"}),
}


class _Unpickler(pickle.Unpickler):
    """Reads DCP's records and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is no record of torch.distributed.checkpoint"
            )
        if module == "pathlib":  # the folder it was written to, of whatever system
            return _path_text
        return super().find_class(module, name)


def _path_text(*parts: str) -> str:
    return "/".join(parts)


class DcpFiles:
    """See `bagpipe.start_from.tensor_source.TensorFiles`.

    Args:
        folder: has a ``.metadata`` file.

    Raises:
        InputError: the metadata is not that of torch.distributed.checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
            records = {
                name: record for name, record in metadata.state_dict_metadata.items() if hasattr(record, "chunks")
            }
            self._places = {
                (index.fqn, tuple(index.offset)): info
                for index, info in metadata.storage_data.items()
                if index.offset is not None
            }
            self._chunks = {
                name: [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in record.chunks]
                for name, record in records.items()
            }
            self.outline: Mapping[str, Tensor] = {
                name: torch.empty(record.size, dtype=record.properties.dtype, device="meta")
                for name, record in records.items()
            }
        except OSError as error:
            raise InputError(f"{folder / '.metadata'} cannot be read: {error.strerror}") from None
        except (pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, IndexError, KeyError) as error:
            raise InputError(f"{folder / '.metadata'} is not that of torch.distributed.checkpoint: {error}") from None

    def tensor(self, name: str) -> Tensor:
        found = torch.empty(self.outline[name].shape, dtype=self.outline[name].dtype)
        for offsets, sizes in self._chunks[name]:
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            found[place] = self.shard(name, offsets)
        return found

    def rows(self, name: str) -> _Rows:
        return _Rows(self, name, self._chunks[name])

    def shard(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        """One shard.

        Raises:
            InputError: it is missing, or is not what the metadata says.
        """
        info = self._places.get((name, offsets))
        if info is None:
            raise InputError(f"{self._folder}: {name} has no shard at {list(offsets)}")
        if getattr(info, "transform_descriptors", None):
            raise InputError(
                f"{self._folder}: {name} is transformed by {info.transform_descriptors}: expected plain files"
            )
        path = self._folder / Path(info.relative_path).name
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{path}: the shard of {name} cannot be read: {line}") from None
        sizes = dict(self._chunks[name])[offsets]
        if not isinstance(found, Tensor) or tuple(found.shape) != sizes:
            raise InputError(f"{path}: expected {name} {list(sizes)}, got another value")
        return found.detach()


class _Rows:
    """Rows of one matrix, whose shards are row-wise, column-wise or both. A context manager."""

    def __init__(self, files: DcpFiles, name: str, chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self._files = files
        self._name = name
        self._chunks = chunks
        self._held: dict[tuple[int, ...], Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.clear()

    def read(self, first: int, end: int) -> Tensor:
        outline = self._files.outline[self._name]
        found = torch.empty(end - first, outline.shape[1], dtype=outline.dtype)
        for offsets, sizes in self._chunks:
            top, bottom = max(first, offsets[0]), min(end, offsets[0] + sizes[0])
            if bottom <= top:
                self._held.pop(offsets, None)  # rows are read in ascending order
                continue
            if offsets not in self._held:
                self._held[offsets] = self._files.shard(self._name, offsets)
            part = self._held[offsets][top - offsets[0] : bottom - offsets[0]]
            found[top - first : bottom - first, offsets[1] : offsets[1] + sizes[1]] = part
        return found
