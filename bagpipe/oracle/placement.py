"""Owner of a row that enters the cache: the rank that uses it most and has room.

    uses[row, rank] ──most uses; ties: least load──> owner ──no room?──> next best rank with room

Owners decide which bytes travel where, never what is computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assembly import positions_by_rank

__all__ = ["place_rows"]

#: Tied rows are placed in this many parts per rank. Each part sees the load that the previous parts left.
_PARTS_PER_RANK = 2


def place_rows(
    uses: NDArray[np.unsignedinteger], load: NDArray[np.int64], room: NDArray[np.int64]
) -> NDArray[np.uint16]:
    """uint16 ``[rows]``: an owner for each row.

    Args:
        uses: ``[rows, ranks]``, how often each rank will use the row.
        load: int64 ``[ranks]``, rows that each rank owns already.
        room: int64 ``[ranks]``, rows that each rank can take; the sum is at least `rows`.
    """
    owners = np.zeros(uses.shape[0], dtype=np.uint16)
    load, room = load.copy(), room.copy()
    waiting = np.arange(uses.shape[0])
    by_rank = np.ascontiguousarray(uses.T)
    # Each round but the last fills a rank.
    while waiting.shape[0]:
        is_open = np.flatnonzero(room)
        is_whole = is_open.shape[0] == load.shape[0] and waiting.shape[0] == uses.shape[0]
        wanted = _most_used(by_rank if is_whole else by_rank[is_open].take(waiting, axis=1), load[is_open])
        left_over: list[NDArray[np.int64]] = []
        for rank, positions in zip(is_open.tolist(), positions_by_rank(wanted, is_open.shape[0]), strict=True):
            asking = waiting.take(positions)
            left_over.append(asking[room[rank] :])
            asking = asking[: room[rank]]
            owners[asking] = rank
            load[rank] += asking.shape[0]
            room[rank] -= asking.shape[0]
        waiting = np.sort(np.concatenate(left_over))
    return owners


def _most_used(uses: NDArray[np.unsignedinteger], load: NDArray[np.int64]) -> NDArray[np.uint16]:
    """uint16 ``[rows]``: the rank with most uses (``[ranks, rows]``); ties go to the least load."""
    num_ranks = load.shape[0]
    is_most = uses == uses.max(axis=0)
    wanted = _last_true(is_most)
    is_tied = is_most.sum(axis=0, dtype=np.min_scalar_type(num_ranks)) > 1
    load = load + np.bincount(wanted[~is_tied], minlength=num_ranks)
    for part in np.array_split(np.flatnonzero(is_tied), _PARTS_PER_RANK * num_ranks):
        by_load = np.argsort(load, kind="stable")[::-1]
        wanted[part] = by_load[_last_true(is_most.take(part, axis=1)[by_load])]
        load = load + np.bincount(wanted[part], minlength=num_ranks)
    return wanted


def _last_true(flags: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """uint16 ``[columns]``: the last row that is True."""
    numbers = np.arange(flags.shape[0], dtype=np.min_scalar_type(flags.shape[0]))
    last: NDArray[np.uint16] = np.max(flags * numbers[:, None], axis=0).astype(np.uint16)
    return last
