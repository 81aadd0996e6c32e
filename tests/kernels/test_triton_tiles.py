"""Tiles cover all rows and columns, and stay in registers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.kernels.triton_tiles import Tile, choose_tile


@given(st.integers(1, 10_000), st.sampled_from([4, 8]), st.integers(0, 10**6))
def test_tiles_cover_everything(dim: int, item_bytes: int, num_rows: int) -> None:
    tile = choose_tile(dim, item_bytes)
    assert dim <= tile.block < max(5, 2 * dim)
    for count in (tile.rows, tile.block, tile.num_warps):
        assert count & (count - 1) == 0, "Triton's tiles are powers of two"
    (programs,) = tile.grid(num_rows)
    assert (programs - 1) * tile.rows < num_rows <= programs * tile.rows or num_rows == programs == 0


@pytest.mark.parametrize(
    ("dim", "item_bytes", "expected"),
    [
        (16, 4, Tile(rows=16, block=16, num_warps=1)),
        (48, 4, Tile(rows=4, block=64, num_warps=1)),
        (128, 4, Tile(rows=2, block=128, num_warps=1)),
        (128, 8, Tile(rows=1, block=128, num_warps=1)),
        (1024, 4, Tile(rows=1, block=1024, num_warps=4)),
    ],
)
def test_chosen(dim: int, item_bytes: int, expected: Tile) -> None:
    assert choose_tile(dim, item_bytes) == expected
