"""Assigns the examples of a global batch to ranks: a pure function of the batches so far and the world size.

It does not depend on the cache or the lookahead, which would change sums over a rank's examples. Every assigner but
"own" gives rank r as many examples as the contiguous split, ``(r + 1) * B // N - r * B // N`` of B; see `share_bounds`.

    contiguous   rank r gets neighbouring examples
    locality     hash(row) ──home[]──> rank that used the row last ──sum over the example's ids──> score[B, N]
                 best score first, within the sizes; then the rows' homes follow
    own          every rank has brought its examples itself (`Batch.rank_examples`)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.handles import hash_rows
from bagpipe.oracle.index import BatchIndex
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_index import RankIndex, busiest_ranks
from bagpipe.types.batch import Batch

__all__ = ["ASSIGNERS", "Assigner", "Contiguous", "Locality", "Own", "check_shares", "share_bounds"]

#: Rows hash to the cells of the home table. 2**24 cells take 16 or 32 MiB and hold half the rows of Criteo.
HOME_BITS = 24
#: Shares are small numbers. A larger one is an error.
MAX_SHARE = (1 << 31) - 1


class Assigner(Protocol):
    """Assigns batches in order: `assign`, then `learn`.

    Attributes:
        learns: the assignment depends on previous batches.
    """

    learns: bool

    def assign(self, batch: Batch, index: BatchIndex) -> NDArray[np.uint16]:
        """uint16 ``[num_examples]``: the rank of each example."""
        ...

    def learn(self, index: BatchIndex, rank_indexes: Sequence[RankIndex]) -> None:
        """Learn from the split of the batch."""
        ...


def share_bounds(num_examples: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Borders of a contiguous split: rank r gets the examples from ``bounds[r]`` up to ``bounds[r + 1]``.

    Args:
        num_examples: of a global batch.
        shares: by rank, in proportion. Equal shares of any value give the equal split. With fewer examples than ranks
            some ranks get none. A rank with share 0 never gets any.
    """
    sums = (0, *itertools.accumulate(shares))
    return tuple(num_examples * before // sums[-1] for before in sums)


def check_shares(spec: OracleSpec) -> None:
    """Check the example shares.

    Raises:
        InputError: not one share per rank, a share out of range, all shares 0, or unequal shares with an assignment
            that supports equal ones only.
    """
    shares = spec.example_shares
    if not shares:
        return
    if len(shares) != spec.world_size:
        raise InputError(f"example shares: expected one for each of {spec.world_size} ranks, got {len(shares)}")
    for rank, share in enumerate(shares):
        if not 0 <= share <= MAX_SHARE:
            raise InputError(f"example shares: expected a number from 0 to {MAX_SHARE} for rank {rank}, got {share}")
    if not any(shares):
        raise InputError("example shares: expected a rank with a share above 0, got 0 for all")
    if spec.assign != "contiguous" and len(set(shares)) > 1:
        raise InputError(
            f"cacher.assign must be contiguous where ranks read unequal shares of a batch "
            f"({', '.join(map(str, shares))}), got {spec.assign!r}"
        )


class Contiguous:
    """Neighbouring examples stay together."""

    learns = False

    def __init__(self, spec: OracleSpec) -> None:
        self._ranks = np.arange(spec.world_size, dtype=np.uint16)
        self._shares = spec.example_shares or (1,) * spec.world_size

    def assign(self, batch: Batch, index: BatchIndex) -> NDArray[np.uint16]:
        """See `Assigner`."""
        return np.repeat(self._ranks, np.diff(share_bounds(batch.num_examples, self._shares)))

    def learn(self, index: BatchIndex, rank_indexes: Sequence[RankIndex]) -> None:
        """No-op."""


class Locality:
    """Examples go to the ranks that used their rows last.

    A row's weight is ``uses ** -1/4``, with its uses in the batch. One example can save the transfer of a rare row, but
    hardly that of a frequent one. But the next batch uses frequent rows too, and the step waits for their transfer. Of
    the exponents -2, -1, -1/2, -1/4 and 0 this one moves fewest rows (benchmarks/exchange), and square roots round the
    same on every machine.

    Args:
        home_bits: the home table has ``2**home_bits`` cells.
    """

    learns = True

    def __init__(self, spec: OracleSpec, *, home_bits: int = HOME_BITS) -> None:
        self._spec = spec
        self._shift = np.uint64(64 - home_bits)
        # 0: no home; rank + 1 otherwise.
        self._home = np.zeros(1 << home_bits, dtype=np.uint8 if spec.world_size < 1 << 8 else np.uint16)

    def assign(self, batch: Batch, index: BatchIndex) -> NDArray[np.uint16]:
        """See `Assigner`. Ties, as in the first batch, go as in `Contiguous`."""
        num_examples, world_size = batch.num_examples, self._spec.world_size
        homes = self._home.take(self._cells(index)).astype(np.int64)
        weights = 1 / np.sqrt(np.sqrt(np.diff(index.offsets)))
        columns = world_size + 1
        rows = index.inverse
        cells = self._example_of_occurrence(batch) * columns + homes.take(rows)
        sums = np.bincount(cells, weights.take(rows), minlength=num_examples * columns)
        score = sums.astype(np.float64, copy=False).reshape(num_examples, columns)[:, 1:]
        sizes = np.diff(share_bounds(num_examples, (1,) * world_size))
        # Less than the weight of one use of any row, so it only breaks ties.
        score[np.arange(num_examples), np.repeat(np.arange(world_size), sizes)] += 0.5 / max(1, index.order.shape[0])
        return _balanced(score, sizes)

    def learn(self, index: BatchIndex, rank_indexes: Sequence[RankIndex]) -> None:
        """Set the home of each row to the rank that used it most."""
        homes = busiest_ranks(rank_indexes, len(index.unique)) + 1
        self._home[self._cells(index)] = homes.astype(self._home.dtype)

    def _cells(self, index: BatchIndex) -> NDArray[np.int64]:
        """int64 ``[len(unique)]``: the cell of each unique row."""
        return (hash_rows(index.unique) >> self._shift).astype(np.int64)

    def _example_of_occurrence(self, batch: Batch) -> NDArray[np.int64]:
        examples = np.arange(batch.num_examples)
        if batch.is_one_hot:
            return np.tile(examples, len(self._spec.features))
        return np.concatenate(
            [examples[:0], *(np.repeat(examples, batch.lengths[ref.feature]) for ref in self._spec.features)]
        )


class Own:
    """Every rank keeps the examples that it brought."""

    learns = False

    def __init__(self, spec: OracleSpec) -> None:
        self._ranks = np.arange(spec.world_size, dtype=np.uint16)

    def assign(self, batch: Batch, index: BatchIndex) -> NDArray[np.uint16]:
        """See `Assigner`.

        Raises:
            InputError: the batch does not say how many examples each rank brought.
        """
        brought = batch.rank_examples
        if len(brought) != len(self._ranks) or min(brought) < 0 or sum(brought) != batch.num_examples:
            raise InputError(
                f"batch {batch.index}: expected the examples that each of {len(self._ranks)} ranks brought, "
                f"{batch.num_examples} in all, got {list(brought)}"
            )
        return np.repeat(self._ranks, brought)

    def learn(self, index: BatchIndex, rank_indexes: Sequence[RankIndex]) -> None:
        """No-op."""


ASSIGNERS: Mapping[str, Callable[[OracleSpec], Assigner]] = {
    "contiguous": Contiguous,
    "locality": Locality,
    "own": Own,
}


def _balanced(score: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.uint16]:
    """uint16 ``[num_examples]``: a rank for each example, with `sizes` examples per rank.

    In each round every unassigned example requests its best rank with room. A rank with too many requests takes those
    with the largest margin over their second choice. Each round but the last fills a rank, so there are at most
    `world_size` rounds.
    """
    ranks = np.zeros(score.shape[0], dtype=np.uint16)
    room = sizes.copy()
    waiting = np.arange(score.shape[0])
    while waiting.shape[0]:
        is_open = np.flatnonzero(room)
        open_scores = score[np.ix_(waiting, is_open)]
        best = np.argmax(open_scores, axis=1)
        margin = _margin(open_scores)
        left_over: list[NDArray[np.int64]] = []
        for column, rank in enumerate(is_open.tolist()):
            asking = np.flatnonzero(best == column)
            if asking.shape[0] > room[rank]:
                asking = asking[np.argsort(-margin[asking], kind="stable")]
                left_over.append(waiting[asking[room[rank] :]])
                asking = asking[: room[rank]]
            ranks[waiting[asking]] = rank
            room[rank] -= asking.shape[0]
        waiting = np.sort(np.concatenate(left_over)) if left_over else waiting[:0]
    return ranks


def _margin(score: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 ``[rows]``: how much more the best column has than the second best."""
    if score.shape[1] == 1:
        return np.zeros(score.shape[0])
    second, first = np.partition(score, score.shape[1] - 2, axis=1)[:, -2:].T
    margin: NDArray[np.float64] = first - second
    return margin
