"""Which rows one Triton program computes: a tile of rows by columns, small enough for registers.

    columns: all of a row, padded to a power of two        rows: as many as 32 bytes a lane have room for

One warp is one program wherever a row fits: the rows of a tile are walked in step, to the longest of them, and the
fewer they are the less the others wait. Numbers of lanes and bytes are NVIDIA's (a warp has 32 lanes, an access at most
16 bytes); those of the loads in flight are to be confirmed on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tile", "choose_tile"]

_LANES = 32
#: Two accesses of 16 bytes: what each lane holds of every matrix that its program works on.
_LANE_BYTES = 32
_MAX_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program computes.

    Attributes:
        rows: rows, or bags.
        block: columns, a power of two.
        num_warps: warps that share it.
    """

    rows: int
    block: int
    num_warps: int

    def grid(self, num_rows: int) -> tuple[int]:
        """Programs for `num_rows` rows."""
        return (-(-num_rows // self.rows),)


def choose_tile(dim: int, item_bytes: int) -> Tile:
    """The tile for rows of `dim` numbers of `item_bytes` bytes each, as they are computed with."""
    block = 1 << max(2, (dim - 1).bit_length())
    lane_items = _LANE_BYTES // item_bytes
    num_warps = min(_MAX_WARPS, max(1, block // (_LANES * lane_items)))
    rows = max(1, _LANES * lane_items * num_warps // block)
    return Tile(rows=rows, block=block, num_warps=num_warps)
