"""`Uploader`: a batch's host arrays as tensors of one device; and rows with their slots.

    arrays ──Uploader.tensor──> tensors     CPU: the arrays themselves
                                            device: packed into one staging area, one copy for all at the end

Rule of this file: *what is uploaded is read only after the block of `Uploads.batch` has ended*, as only then is it on
its way. Its device memory belongs to the stream current in the block; whoever uses it on other streams holds it until
that is over on the device. (A batch's is held by its flight, which the data lane drops when the batch's end on the
device is known to the host, so that the next batch may be given the same memory.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from bagpipe.kernels.segment_sum import Chunks, HostLongRows, HostSegmentSum, Int32, LongRows, SegmentSum
from bagpipe.oracle.plan import RowList
from bagpipe.pipeline.stream import Streams

__all__ = ["DirectUploads", "SlotRows", "StagedUploader", "StagedUploads", "Uploader", "Uploads", "open_uploads"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """Rows in this rank's cache.

    Attributes:
        rows: the rows, on the host.
        slots: int32 ``[len(rows)]``, on the host.
        slot_index: int64 ``[len(rows)]``, the same on the device.
        names: the rows' names on the device, if the kernels need them (`Kernels.needs_names`).
    """

    rows: RowList
    slots: Int32
    slot_index: Tensor
    names: RowNames | None = None


class Uploader:
    """Host arrays to tensors of one device, each by itself.

    Args:
        device: the device.
        dtype: of vectors and gradients.
        names: rows with slots get their names too (`Kernels.needs_names`).
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
        """The array, or its values in another dtype. On a CPU the tensor may be the array's own memory."""
        return torch.from_numpy(array).to(self._device, dtype, non_blocking=True)

    def numbers(self, array: NDArray[np.floating]) -> Tensor:
        """The values in the dtype of vectors, in memory that begins where torch's own does, and is not the array's."""
        return torch.from_numpy(array).to(self._device, self._dtype, non_blocking=True, copy=True)

    def block(self, num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors ``[num_rows, width]``: one on the host to be filled in the block, and what it becomes.

        They are valid until the next batch.
        """
        if self._num_blocks == len(self._blocks):
            self._blocks.append(Scratch(torch.uint8, torch.device("cpu")))
        memory = self._blocks[self._num_blocks].take(1, num_rows * width * dtype.itemsize).view(-1)
        self._num_blocks += 1
        host = empty_view(memory, 0, (num_rows, width), dtype)
        return host, host

    def reuse(self) -> None:
        """Blocks given so far are no longer used."""
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


class StagedUploader(Uploader):
    """Arrays of one batch, packed. If the area is too small, more memory is taken, and copied by itself.

    Args:
        streams: of the device.
        area: free to be filled.
        device, dtype, names, max_terms: see `Uploader`.

    Attributes:
        num_bytes: what the batch needs.
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

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        wanted = dtype if dtype is not None else torch.from_numpy(np.empty(0, array.dtype)).dtype
        host, there = self._take(array.shape, wanted)
        np.copyto(host.numpy(), array, casting="unsafe")
        return there

    def numbers(self, array: NDArray[np.floating]) -> Tensor:
        return self.tensor(array, self._dtype)

    def block(self, num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._take((num_rows, width), dtype)

    def send(self) -> None:
        """Enqueue the copies: one, or one for each chunk of memory that had to be added."""
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
    """Staging memory, the device memory it is copied to, and how much of both is used."""

    __slots__ = ("host", "there", "used")

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        # As large as the area, not as what a batch needs: blocks of one size are given again, and memory stays flat.
        self.there = torch.empty(len(host), dtype=torch.uint8, device=device)
        self.used = 0


class Uploads(Protocol):
    """Makes batches' uploads, in one lane or under one lock."""

    def batch(self) -> AbstractContextManager[Uploader]:
        """Fill it in the block; what it gave may be used, on the current stream, once the block has ended."""
        ...


class DirectUploads:
    """No device, no staging.

    Args:
        uploader: makes the tensors.
    """

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader

    def batch(self) -> AbstractContextManager[Uploader]:
        self._uploader.reuse()
        return nullcontext(self._uploader)


class StagedUploads:
    """Through a ring of staging areas.

    Args:
        streams: of the device.
        make: makes the uploader that fills an area.
        num_areas: batches whose copies may be under way.

    Attributes:
        ring: the areas.
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
    """Uploads to a device: staged where its work is enqueued.

    Args:
        streams: of the device.
        device, dtype, names, max_terms: see `Uploader`.
        num_areas: batches whose copies may be under way.
    """
    if not streams.is_async:
        return DirectUploads(Uploader(device, dtype, names=names, max_terms=max_terms))

    def make(area: Area) -> StagedUploader:
        return StagedUploader(streams, area, device, dtype, names=names, max_terms=max_terms)

    return StagedUploads(streams, make, num_areas=num_areas)
