"""`GroupExchange`: one group's share of a batch's exchange, as tensors and counts. Made ahead, in any thread.

    owner side                                                   consumer side
    slots of the rows it serves, consumer by consumer ─pull────> rows, owner by owner, in the order of `GroupContext`
    what arrived, consumer by consumer ─SegmentSum─> row  <───push─ gradients of those rows, owner by owner

Both ends walk the rows they share in the order of the consumer's unique rows, so counts are all that has to match.
Every exchange has two parts: what the batch before (pull) or after (push) touches too, which is the critical path, and
the rest. A rank serves itself the same way: its own gradient is one more contribution, in its place by rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.lookup_layout import TableGroup
from bagpipe.cache.slots import rows_of_tables
from bagpipe.cache.upload import SlotRows, Uploader
from bagpipe.kernels.segment_sum import HostSegmentSum, Int32, SegmentSum
from bagpipe.oracle.assembly import select_rows
from bagpipe.oracle.plan import ConsumerPlan, ExchangePlan

__all__ = ["GroupExchange", "PreparedExchange", "PullPart", "PushPart", "prepare_exchange"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullPart:
    """Rows that travel from owners to consumers together.

    Attributes:
        slot_index: int64, slots of the rows this rank gives, consumer by consumer.
        given: rows for each rank.
        taken: rows from each rank.
        first: where the taken rows start among the group's rows.
    """

    slot_index: Tensor
    given: tuple[int, ...]
    taken: tuple[int, ...]
    first: int

    @property
    def end(self) -> int:
        """Where they end."""
        return self.first + sum(self.taken)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushPart:
    """Row gradients that travel from consumers to owners together.

    Attributes:
        given: gradient rows for each rank.
        taken: gradient rows from each rank.
        owned: the rows they belong to.
        segment_sum: taken gradient rows -> owned rows, contributions in rank order.
    """

    given: tuple[int, ...]
    taken: tuple[int, ...]
    owned: SlotRows
    segment_sum: SegmentSum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupExchange:
    """One group's exchange.

    Attributes:
        early, pull: rows the batch before did not use, and those it did.
        push, late: gradients of rows the next batch uses, and the others.
        owned: all rows of the group that this rank owns and some rank uses.
    """

    early: PullPart
    pull: PullPart
    push: PushPart
    late: PushPart
    owned: SlotRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedExchange:
    """A group's exchange, and what it means for the group's own tensors.

    Attributes:
        exchange: the exchange.
        place: int32 ``[U]``, where each of the plan's unique rows stands among the group's rows as they arrive.
        backward: the sums of the gradients to push: now, later.
    """

    exchange: GroupExchange
    place: Int32
    backward: tuple[SegmentSum, SegmentSum]


def prepare_exchange(
    group: TableGroup, consumer: ConsumerPlan, exchange: ExchangePlan, segment_sum: HostSegmentSum, upload: Uploader
) -> PreparedExchange:
    """Cut one group out of a rank's plan.

    Args:
        group: the tables.
        consumer, exchange: the rank's plan.
        segment_sum: the gradients of the group's unique rows, in the plan's order.
        upload: makes tensors.
    """
    used = rows_of_tables(consumer.unique, group.first_table, group.end_table)
    num_ranks = len(exchange.serve_offsets) - 1
    owners, pull_now, sync_now = consumer.owners[used], exchange.pull_now[used], consumer.sync_now[used]
    owned = rows_of_tables(exchange.owned, group.first_table, group.end_table)
    early_rows, early_taken = _by_owner(owners, ~pull_now, num_ranks)
    now_rows, now_taken = _by_owner(owners, pull_now, num_ranks)
    push_rows, push_given = _by_owner(owners, sync_now, num_ranks)
    late_rows, late_given = _by_owner(owners, ~sync_now, num_ranks)
    place = np.empty(len(owners), dtype=np.int32)
    place[early_rows] = np.arange(len(early_rows), dtype=np.int32)
    place[now_rows] = np.arange(len(early_rows), len(owners), dtype=np.int32)

    in_group = np.zeros(len(exchange.owned), dtype=np.bool_)
    in_group[owned] = True
    return PreparedExchange(
        exchange=GroupExchange(
            early=_pull_part(exchange, in_group & ~exchange.owned_pull_now, early_taken, 0, upload),
            pull=_pull_part(exchange, in_group & exchange.owned_pull_now, now_taken, len(early_rows), upload),
            push=_push_part(exchange, in_group & exchange.owned_sync_now, push_given, upload),
            late=_push_part(exchange, in_group & ~exchange.owned_sync_now, late_given, upload),
            owned=_slot_rows(exchange, in_group, upload),
        ),
        place=place,
        backward=(upload.segment_sum(segment_sum.select(push_rows)), upload.segment_sum(segment_sum.select(late_rows))),
    )


def _by_owner(
    owners: NDArray[np.uint16], chosen: NDArray[np.bool_], num_ranks: int
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Positions of the chosen rows, owner by owner, ascending within each; and how many each owner has."""
    rows = np.flatnonzero(chosen)
    of_rows = owners[rows]
    return rows[np.argsort(of_rows, kind="stable")], tuple(np.bincount(of_rows, minlength=num_ranks).tolist())


def _served(exchange: ExchangePlan, chosen: NDArray[np.bool_]) -> tuple[Int32, tuple[int, ...]]:
    """Of the rows served, the chosen ones as positions among the owned rows; and how many each consumer gets."""
    keep = chosen[exchange.serve_rows]
    before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=before[1:])
    return exchange.serve_rows[keep], tuple(np.diff(before[exchange.serve_offsets]).tolist())


def _pull_part(
    exchange: ExchangePlan, chosen: NDArray[np.bool_], taken: tuple[int, ...], first: int, upload: Uploader
) -> PullPart:
    rows, given = _served(exchange, chosen)
    slot_index = upload.tensor(exchange.owned_slots[rows].astype(np.int64))
    return PullPart(slot_index=slot_index, given=given, taken=taken, first=first)


def _push_part(exchange: ExchangePlan, chosen: NDArray[np.bool_], given: tuple[int, ...], upload: Uploader) -> PushPart:
    rows, taken = _served(exchange, chosen)
    number = np.cumsum(chosen, dtype=np.int32)
    numbers = number[rows] - np.int32(1)
    row_starts = np.zeros(int(number[-1]) + 1 if len(number) else 1, dtype=np.int32)
    np.cumsum(np.bincount(numbers, minlength=len(row_starts) - 1), out=row_starts[1:])
    # Stable, so that each row's contributions stay in rank order.
    segment_sum = HostSegmentSum(row_starts=row_starts, sources=np.argsort(numbers, kind="stable").astype(np.int32))
    return PushPart(
        given=given,
        taken=taken,
        owned=_slot_rows(exchange, chosen, upload),
        segment_sum=upload.segment_sum(segment_sum),
    )


def _slot_rows(exchange: ExchangePlan, chosen: NDArray[np.bool_], upload: Uploader) -> SlotRows:
    positions = np.flatnonzero(chosen)
    return upload.slot_rows(select_rows(exchange.owned, positions), exchange.owned_slots[positions])
