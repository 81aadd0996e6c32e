"""Cells of views compared with the bytes of their elements."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.races.regions import cells_of
from tests.harness.races.shadow import CELL_BYTES


def numbers_of(tensor: Tensor, rows: Tensor | None = None) -> set[int]:
    cells = cells_of(tensor, rows)
    return set(range(cells.start, cells.stop)) if isinstance(cells, slice) else set(cells.tolist())


@settings(max_examples=40)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8]),
    st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.booleans(),
)  # fmt: skip
def test_cells_cover_exactly_the_bytes(
    dtype: torch.dtype, row: int, num_rows: int, width: int, column: int, transposed: bool
) -> None:
    def view(base: Tensor) -> Tensor:
        part = base[row : row + num_rows, column : column + width]
        return part.T if transposed else part

    size = dtype.itemsize
    elements = view(torch.arange(144).view(12, 12)).flatten().tolist()
    bytes_used = {element * size + byte for element in elements for byte in range(size)}
    assert numbers_of(view(torch.zeros(12, 12, dtype=dtype))) == {byte // CELL_BYTES for byte in bytes_used}


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 8))
def test_rows_have_separate_cells(rows: list[int], width: int) -> None:
    fronts = torch.zeros(5, 8)[:, :width]
    wanted = {row * 8 + column for row in rows for column in range(width)}
    assert numbers_of(fronts, torch.tensor(rows, dtype=torch.int32)) == wanted


def test_rows_viewed_as_wider_elements() -> None:
    wide = torch.zeros(4, 8)[:, :4].view(torch.complex128)
    assert numbers_of(wide, torch.tensor([3])) == {24, 25, 26, 27}
