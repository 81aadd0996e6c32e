"""Uploads: staged tensors have the values of direct ones, in one copy, and survive the reuse of their area."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.staging import ALIGN_BYTES
from bagpipe.cache.upload import DirectUploads, StagedUploader, StagedUploads, Uploader, open_uploads
from bagpipe.kernels.segment_sum import HostSegmentSum
from bagpipe.oracle.plan import RowList
from bagpipe.pipeline.stream import NullStreams
from bagpipe.testing.recording_streams import RecordingStreams

CPU = torch.device("cpu")


def staged(num_areas: int = 2, **form: Any) -> StagedUploads:
    uploads = open_uploads(RecordingStreams(), CPU, torch.float64, num_areas=num_areas, **form)
    assert isinstance(uploads, StagedUploads)
    return uploads


def test_a_cpu_takes_arrays_as_they_are() -> None:
    uploads = open_uploads(NullStreams(), CPU, torch.float32, num_areas=3)
    assert isinstance(uploads, DirectUploads)
    array = np.arange(5)
    with uploads.batch() as upload:
        assert upload.tensor(array).data_ptr() == array.ctypes.data
        assert upload.tensor(array, torch.int32).dtype == torch.int32
        numbers = array.astype(np.float32)
        assert upload.numbers(numbers).data_ptr() != numbers.ctypes.data


@given(st.lists(st.tuples(st.sampled_from(["i4", "i8", "f4", "f8"]), st.integers(0, 2_000)), max_size=6))
def test_staged_tensors_have_the_arrays_values(sizes: list[tuple[str, int]]) -> None:
    arrays = [np.arange(size).astype(dtype) for dtype, size in sizes]
    with staged().batch() as upload:
        tensors = [upload.tensor(array) for array in arrays]
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_values_change_their_dtype_on_the_host_as_on_the_device() -> None:
    thirds = 1.0 / np.arange(1, 50)
    with staged().batch() as upload:
        halves, whole = upload.tensor(thirds, torch.float32), upload.numbers(thirds.astype(np.float32))
        slots = upload.tensor(np.array([3, 1], dtype=np.int32), torch.int64)
    assert torch.equal(halves, torch.from_numpy(thirds).to(torch.float32))
    assert whole.dtype == torch.float64
    assert slots.tolist() == [3, 1]
    assert slots.dtype == torch.int64


def test_one_batch_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    original = StagedUploader.send

    def send(self: StagedUploader) -> None:
        sent.append(len(self._chunks))
        original(self)

    monkeypatch.setattr(StagedUploader, "send", send)
    uploads = staged(num_areas=1)
    for _ in range(4):
        with uploads.batch() as upload:
            tensors = [upload.tensor(np.full(100_000, number)) for number in range(10)]
        assert [int(tensor[-1]) for tensor in tensors] == list(range(10))
    # 8 MB do not fit the first area of 1 MiB; the areas after have what a batch needs.
    assert sent[0] > 1
    assert sent[1:] == [1, 1, 1]
    addresses = {tensor.data_ptr() % ALIGN_BYTES for tensor in tensors}
    assert len(addresses) == 1  # all begin alike, whatever their dtypes and sizes


def test_tensors_outlive_their_area() -> None:
    uploads = staged(num_areas=1)
    kept = []
    for batch in range(5):
        with uploads.batch() as upload:
            kept.append(upload.tensor(np.full(10, batch)))
    assert [int(tensor.sum()) for tensor in kept] == [0, 10, 20, 30, 40]


def test_a_batch_that_is_not_completed_is_not_sent() -> None:
    streams = RecordingStreams()
    uploads = open_uploads(streams, CPU, torch.float64, num_areas=1)

    def fail() -> None:
        with uploads.batch() as upload:
            upload.tensor(np.ones(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not streams.log


def test_an_event_is_recorded_after_the_copy() -> None:
    streams = RecordingStreams()
    uploads = open_uploads(streams, CPU, torch.float64, num_areas=1)
    with uploads.batch() as upload:
        upload.tensor(np.ones(3))
        assert not streams.log
    assert streams.log == [("main", "record", "main#0")]


@pytest.mark.parametrize("make", [lambda: Uploader(CPU, torch.float64, names=True, max_terms=2), None])
def test_tensors_of_a_plan(make: Any) -> None:
    segment_sum = HostSegmentSum(
        row_starts=np.array([0, 1, 6], np.int32),
        sources=np.arange(6, dtype=np.int32),
        coefficients=np.linspace(0, 1, 6),
    )
    rows = RowList(table_offsets=np.array([0, 1, 2]), ids=np.array([7, 9]))
    uploads = staged(names=True, max_terms=2) if make is None else DirectUploads(make())
    with uploads.batch() as upload:
        found = upload.segment_sum(segment_sum)
        where = upload.slot_rows(rows, np.array([4, 2], np.int32))
        assert upload.optional(None) is None
    assert found.row_offsets.tolist() == [0, 1, 6]
    assert found.coefficients is not None
    assert found.coefficients.tolist() == np.linspace(0, 1, 6).tolist()
    assert found.long is not None
    assert found.long.rows.tolist() == [1]
    assert where.slot_index.tolist() == [4, 2]
    assert where.names is not None
    assert (where.names.tables.tolist(), where.names.ids.tolist()) == ([0, 1], [7, 9])


@pytest.mark.parametrize("uploads", [staged(), DirectUploads(Uploader(CPU, torch.float32))])
@pytest.mark.parametrize("counts", [(3,), (2, 0, 5), (70_000, 1, 9)])
def test_rows_of_parts_are_one_tensor(uploads: Any, counts: tuple[int, ...]) -> None:
    """Parts of one array, or arrays of their own: the same tensor."""
    whole = np.arange(4 * sum(counts), dtype=np.float32).reshape(-1, 4)
    parts = np.split(whole, np.cumsum(counts)[:-1])
    with uploads.batch() as upload:
        found = [upload.rows(parts, torch.float32), upload.rows([part.copy() for part in parts], torch.float32)]
    assert all(torch.equal(rows, torch.from_numpy(whole)) for rows in found)


def test_consecutive_parts_are_not_copied() -> None:
    whole = np.ones((9_000, 4), np.float32)
    upload = Uploader(CPU, torch.float32)
    shares = [
        np.shares_memory(upload.rows(parts, torch.float32).numpy(), whole)
        for parts in (
            [whole[1_000:4_000], whole[4_000:4_000], whole[4_000:]],
            [whole[4_000:], whole[:4_000]],
            [whole[:4_000], whole[4_001:]],
            [whole[:4_000], np.ones((5_000, 4), np.float32)],
        )
    ]
    assert shares == [True, False, False, False]


_WIDE = np.arange(1 << 16, dtype=np.float32).reshape(-1, 8).copy()  # views have it as their base


@pytest.mark.parametrize(
    "rows",
    [
        _WIDE[:, :4],
        _WIDE[::2],
        _WIDE[::-1],
        _WIDE.reshape(-1, 4)[3:5_000],
        _WIDE.reshape(-1)[3:-5].reshape(-1, 8),
        np.ndarray((8_192, 8), np.float32, buffer=bytearray(_WIDE.tobytes())),
        torch.from_numpy(_WIDE).numpy(),
    ],
    ids=["columns", "every second", "reversed", "narrower", "between rows", "of bytes", "of a tensor"],
)
def test_rows_of_any_store_are_taken_as_they_are(rows: Any) -> None:
    """A store can return any view, such as the first columns of a wider array."""
    found = Uploader(CPU, torch.float32).rows([rows], torch.float32)
    np.testing.assert_array_equal(found.numpy(), rows)


def test_words_of_half_rows_are_not_copied_either() -> None:
    words = np.empty((1 << 14, 4), np.uint16)
    words[:] = np.arange(1 << 16).reshape(-1, 4)
    rows = Uploader(CPU, torch.float32).rows([words[:100], words[100:]], torch.bfloat16)
    assert rows.dtype == torch.bfloat16
    assert rows.view(torch.uint16).numpy().tobytes() == words.tobytes()
    assert np.shares_memory(rows.view(torch.uint16).numpy(), words)
