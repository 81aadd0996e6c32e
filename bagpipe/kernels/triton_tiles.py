"""Tile sizes of Triton programs: rows by columns, small enough for registers.

    columns: those of a row, padded to a power of two        rows: as many as fit into 32 bytes per thread

A program is one warp wherever a row fits. It sums the rows of a tile in lockstep, up to the longest, so small tiles
waste less time. Constants are NVIDIA's: a warp has 32 threads, an access at most 16 bytes. The number of loads in
flight is yet to be tuned on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tile", "choose_tile"]

_LANES = 32
#: Bytes of each matrix that a thread holds: two accesses of 16 bytes.
_LANE_BYTES = 32
_MAX_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile of one program.

    Attributes:
        rows: number of rows, or bags.
        block: number of columns, a power of two.
        num_warps: warps per program.
    """

    rows: int
    block: int
    num_warps: int

    def grid(self, num_rows: int) -> tuple[int]:
        """Number of programs for `num_rows` rows."""
        return (-(-num_rows // self.rows),)


def choose_tile(dim: int, item_bytes: int) -> Tile:
    """The tile for rows of `dim` elements of `item_bytes` bytes in the compute dtype."""
    block = 1 << max(2, (dim - 1).bit_length())
    lane_items = _LANE_BYTES // item_bytes
    num_warps = min(_MAX_WARPS, max(1, block // (_LANES * lane_items)))
    rows = max(1, _LANES * lane_items * num_warps // block)
    return Tile(rows=rows, block=block, num_warps=num_warps)
