"""`Uploader`: copies the host arrays of a batch to a device.

    arrays ──Uploader.tensor──> tensors     CPU: the arrays themselves
                                            device: packed into one staging area, one copy for all at the end

Rule of this file: *uploaded tensors are valid after the `Uploads.batch` block*, which enqueues the copy. Their device
memory belongs to the stream that is current in the block. A user on another stream holds a reference until its work is
done on the device: `InFlightBatch` holds those of a batch, and the data lane drops it once the host knows that the
batch is done, so that the allocator can reuse the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.slots import row_tables
from bagpipe.cache.staging import Area, Scratch, StagingRing, aligned_bytes, empty_view
from bagpipe.kernels.interface import RowNames
from bagpipe.kernels.row_format import host_words
from bagpipe.kernels.segment_sum import Chunks, HostLongRows, HostSegmentSum, Int32, LongRows, SegmentSum
from bagpipe.oracle.plan import RowList
from bagpipe.pipeline.stream import Streams
from bagpipe.store.interface import Rows

__all__ = ["DirectUploads", "SlotRows", "StagedUploader", "StagedUploads", "Uploader", "Uploads", "open_uploads"]


#: Copies of fewer bytes cost less than to find out whether they are needed.
_MIN_JOINED_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """Rows in this rank's cache, with their slots.

    Attributes:
        rows: the rows, on the host.
        slots: int32 ``[len(rows)]``, on the host.
        slot_index: int64 ``[len(rows)]``, the same on the device.
        names: tables and ids on the device, if the kernels need them (`Kernels.needs_names`).
    """

    rows: RowList
    slots: Int32
    slot_index: Tensor
    names: RowNames | None = None


class Uploader:
    """Copies host arrays to a device, one by one.

    Args:
        device: the device.
        dtype: dtype of vectors and gradients.
        names: `slot_rows` uploads tables and ids (`Kernels.needs_names`).
        max_terms: rows with more terms are summed in chunks (`Kernels.max_terms`).
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, names: bool = False, max_terms: int | None = None
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._names = names
        self._max_terms = max_terms
        self._blocks: list[Scratch] = []
        self._num_blocks = 0

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """The array as a tensor, in `dtype` if given. On a CPU it can share the memory of the array."""
        return torch.from_numpy(array).to(self._device, dtype, non_blocking=True)

    def shared(self, array: NDArray[np.integer]) -> Tensor:
        """The array as a tensor, which is the same one for every call with it. Not to be written."""
        return self.tensor(array)

    def kept(self, array: NDArray[np.integer]) -> Tensor:
        """The array as a tensor, which writes to the array do not change. On a device it is that of `shared`."""
        return torch.from_numpy(array).to(self._device, copy=True)

    def numbers(self, array: NDArray[np.floating]) -> Tensor:
        """A copy of the array in the dtype of vectors, aligned like torch's own allocations."""
        return torch.from_numpy(array).to(self._device, self._dtype, non_blocking=True, copy=True)

    def rows(self, parts: Sequence[Rows], dtype: torch.dtype) -> Tensor:
        """Stored records, ``[num_rows, width]`` in all, as one tensor of `dtype` that is valid until the next batch.

        Args:
            parts: in order, at least one. On a CPU the tensor shares the memory of parts that lie one after the other.
            dtype: of the weights; records are words of its width.
        """
        whole = _joined(parts) if sum(part.nbytes for part in parts) >= _MIN_JOINED_BYTES else None
        return self._copied(parts, dtype) if whole is None else torch.from_numpy(whole).view(dtype)

    def _copied(self, parts: Sequence[Rows], dtype: torch.dtype) -> Tensor:
        host, rows = self._block(sum(map(len, parts)), parts[0].shape[1], dtype)
        np.concatenate(parts, out=host_words(host))
        return rows

    def _block(self, num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors ``[num_rows, width]``: a host buffer to fill in the block, and its copy on the device.

        Both are valid until the next batch.
        """
        if self._num_blocks == len(self._blocks):
            self._blocks.append(Scratch(torch.device("cpu")))
        host = self._blocks[self._num_blocks].take(num_rows, width, dtype)
        self._num_blocks += 1
        return host, host

    def reuse(self) -> None:
        """Reuse the memory of all blocks."""
        self._num_blocks = 0

    def optional(self, array: NDArray[np.integer] | None) -> Tensor | None:
        return None if array is None else self.tensor(array)

    def segment_sum(self, host: HostSegmentSum) -> SegmentSum:
        host = host.split(self._max_terms)
        return SegmentSum(
            row_starts=host.row_starts,
            row_offsets=self.tensor(host.row_starts),
            sources=self.tensor(host.sources),
            coefficients=None if host.coefficients is None else self.tensor(host.coefficients, self._dtype),
            occurrences=self.optional(host.occurrences),
            long=None if host.long is None else self._long_rows(host.long),
        )

    def _long_rows(self, long: HostLongRows) -> LongRows:
        return LongRows(
            rows=self.tensor(long.rows),
            levels=tuple(Chunks(starts=self.tensor(cut.starts), ends=self.tensor(cut.ends)) for cut in long.levels),
            offsets=self.tensor(long.offsets),
            num_terms=long.num_terms,
            max_terms=long.max_terms,
        )

    def slot_rows(self, rows: RowList, slots: Int32) -> SlotRows:
        names = None
        if self._names:
            names = RowNames(tables=self.tensor(row_tables(rows)), ids=self.tensor(rows.ids))
        return SlotRows(rows=rows, slots=slots, slot_index=self.tensor(slots, torch.int64), names=names)


def _joined(parts: Sequence[Rows]) -> Rows | None:
    """The array whose consecutive rows the parts are; None: they are apart, copies, or not whole rows."""
    parts = [part for part in parts if len(part)]  # the address of an empty one means nothing
    base, start = parts[0].base, parts[0].ctypes.data
    if not isinstance(base, np.ndarray) or base.ndim != 2 or not base.flags.carray:
        return None
    end = start
    for part in parts:
        is_whole = part.base is base and part.dtype == base.dtype and part.shape[1] == base.shape[1]
        if not is_whole or not part.flags.c_contiguous or part.ctypes.data != end:
            return None
        end += part.nbytes
    first, rest = divmod(start - base.ctypes.data, base.strides[0])
    whole: Rows = base[first : first + sum(map(len, parts))]
    return None if rest else whole


class StagedUploader(Uploader):
    """Packs the arrays of one batch into an area. If the area is too small, further blocks are copied separately.

    Args:
        streams: streams of the device.
        area: an area from `StagingRing.take`.
        device, dtype, names, max_terms: see `Uploader`.

    Attributes:
        num_bytes: bytes of the batch.
    """

    def __init__(
        self,
        streams: Streams,
        area: Area,
        device: torch.device,
        dtype: torch.dtype,
        *,
        names: bool = False,
        max_terms: int | None = None,
    ) -> None:
        super().__init__(device, dtype, names=names, max_terms=max_terms)
        self.num_bytes = 0
        self._streams = streams
        self._chunks = [_Chunk(area.memory, device)]
        # By address, bytes and dtype of the array, which is held so that no other one gets its address.
        self._shared: dict[tuple[int, int, np.dtype[Any]], tuple[NDArray[np.integer], Tensor]] = {}

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        wanted = dtype if dtype is not None else torch.from_numpy(np.empty(0, array.dtype)).dtype
        host, there = self._take(array.shape, wanted)
        np.copyto(host.numpy(), array, casting="unsafe")
        return there

    def shared(self, array: NDArray[np.integer]) -> Tensor:
        key = (array.ctypes.data, array.nbytes, array.dtype)
        if key not in self._shared:
            self._shared[key] = array, self.tensor(array).data  # writes to other parts of the area do not count as its
        return self._shared[key][1]

    def kept(self, array: NDArray[np.integer]) -> Tensor:
        return self.shared(array)

    def numbers(self, array: NDArray[np.floating]) -> Tensor:
        return self.tensor(array, self._dtype)

    def rows(self, parts: Sequence[Rows], dtype: torch.dtype) -> Tensor:
        return self._copied(parts, dtype)

    def _block(self, num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._take((num_rows, width), dtype)

    def send(self) -> None:
        """Enqueue the copies: one, and one for each additional block of memory."""
        for chunk in self._chunks:
            chunk.there[: chunk.used].copy_(chunk.host[: chunk.used], non_blocking=True)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        num_bytes = aligned_bytes(shape, dtype)
        self.num_bytes += num_bytes
        chunk = self._chunks[-1]
        if chunk.used + num_bytes > len(chunk.host):
            chunk = _Chunk(self._streams.memory(max(num_bytes, len(chunk.host))), self._device)
            self._chunks.append(chunk)
        first, chunk.used = chunk.used, chunk.used + num_bytes
        return empty_view(chunk.host, first, shape, dtype), empty_view(chunk.there, first, shape, dtype)


class _Chunk:
    """Staging memory, the device memory it is copied to, and the number of bytes used in both."""

    __slots__ = ("host", "there", "used")

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        # As large as the area, not the batch: the allocator reuses blocks of one size, so memory stays flat.
        self.there = torch.empty(len(host), dtype=torch.uint8, device=device)
        self.used = 0


class Uploads(Protocol):
    """Uploads of batches, in one lane or under one lock."""

    def batch(self) -> AbstractContextManager[Uploader]:
        """An uploader for one batch. Its tensors are valid on the current stream after the block."""
        ...


class DirectUploads:
    """Uploads without staging, for CPUs.

    Args:
        uploader: makes the tensors.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader

    def batch(self) -> AbstractContextManager[Uploader]:
        self._uploader.reuse()
        return nullcontext(self._uploader)


class StagedUploads:
    """Uploads through a ring of staging areas.

    Args:
        streams: streams of the device.
        make: makes the uploader that fills an area.
        num_areas: maximal number of batches with pending copies.

    Attributes:
        ring: the staging areas.
    """

    def __init__(self, streams: Streams, make: Callable[[Area], StagedUploader], *, num_areas: int) -> None:
        self.ring = StagingRing(streams, num_areas)
        self._streams = streams
        self._make = make

    @contextmanager
    def batch(self) -> Iterator[Uploader]:
        area = self.ring.take()
        upload = self._make(area)
        yield upload
        upload.send()
        area.copied = self._streams.here().record()
        self.ring.need(upload.num_bytes)


def open_uploads(
    streams: Streams,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_areas: int,
    names: bool = False,
    max_terms: int | None = None,
) -> Uploads:
    """Uploads to a device, staged if the device is asynchronous.

    Args:
        streams: streams of the device.
        device, dtype, names, max_terms: see `Uploader`.
        num_areas: maximal number of batches with pending copies.
    """
    if not streams.is_async:
        return DirectUploads(Uploader(device, dtype, names=names, max_terms=max_terms))

    def make(area: Area) -> StagedUploader:
        return StagedUploader(streams, area, device, dtype, names=names, max_terms=max_terms)

    return StagedUploads(streams, make, num_areas=num_areas)
