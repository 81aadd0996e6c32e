"""`GroupExchange`: the row exchange of one table group and batch, as tensors and counts. Built ahead, in any thread.

    owner side                                                   consumer side
    slots of served rows, consumer by consumer ───────pull────> rows, owner by owner, in the order of `GroupContext`
    gradients, consumer by consumer ─SegmentSum─> row  <───push─ gradients of those rows, owner by owner

Both sides order the rows they share like the consumer's unique rows, so only counts have to match. Each exchange has
two parts: rows that the previous batch (pull) or the next batch (push) uses too, on the critical path, and the rest. A
rank serves itself the same way: its own gradient is one contribution among those of all ranks, in rank order. Rows of a
frozen group all travel ahead, and none of their gradients travels.
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

__all__ = ["GroupExchange", "PullPart", "PushPart", "prepare_exchange"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullPart:
    """Rows that owners send to consumers in one exchange.

    Attributes:
        slot_index: int64, slots of the rows this rank sends, consumer by consumer.
        send_counts: rows sent to each rank.
        recv_counts: rows received from each rank.
        first: position of the first received row among the group's rows.
    """

    slot_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    first: int

    @property
    def end(self) -> int:
        """Position after the last received row."""
        return self.first + sum(self.recv_counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PushPart:
    """Row gradients that consumers send to owners in one exchange.

    Attributes:
        send_counts: gradient rows sent to each rank.
        recv_counts: gradient rows received from each rank.
        owned: the owned rows that receive gradients.
        segment_sum: received gradient rows to owned rows, contributions in rank order.
    """

    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    owned: SlotRows
    segment_sum: SegmentSum


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupExchange:
    """The exchange of one table group.

    Attributes:
        prepull, pull: rows that the previous batch does not update, and rows that it does.
        push, push_late: gradients of rows that the next batch uses, and the others.
        owned: all rows of the group that this rank owns and any rank uses.
    """

    prepull: PullPart
    pull: PullPart
    push: PushPart
    push_late: PushPart
    owned: SlotRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PreparedExchange:
    """The exchange of a table group, and the row order it imposes on the group's own tensors.

    Attributes:
        exchange: the exchange.
        arrival: int32 ``[U]``, position of each unique row of the plan in order of arrival.
        pushed: rows of these gradients, owner by owner: now, later.
        backward: segment sums of the gradients to push: now, later.
    """

    exchange: GroupExchange
    arrival: Int32
    pushed: tuple[NDArray[np.int64], NDArray[np.int64]]
    backward: tuple[SegmentSum, SegmentSum]


def prepare_exchange(
    group: TableGroup, consumer: ConsumerPlan, exchange: ExchangePlan, segment_sum: HostSegmentSum, upload: Uploader
) -> _PreparedExchange:
    """Extract the exchange of one group from a rank's plan.

    Args:
        group: the table group.
        consumer, exchange: the rank's plan.
        segment_sum: the gradient sums of the group's unique rows, in plan order.
        upload: makes the tensors.
    """
    used = rows_of_tables(consumer.unique, group.first_table, group.end_table)
    num_ranks = len(exchange.serve_offsets) - 1
    owners, pull_now, push_now = consumer.owners[used], exchange.pull_now[used], consumer.push_now[used]
    push_late, owned_pull_now = ~push_now, exchange.owned_pull_now
    owned = rows_of_tables(exchange.owned, group.first_table, group.end_table)
    in_group = np.zeros(len(exchange.owned), dtype=np.bool_)
    in_group[owned] = True
    pushed = in_group
    if group.is_frozen:
        # The previous batch does not change these rows either, and no gradient of them is pushed.
        pull_now, owned_pull_now = np.zeros_like(pull_now), np.zeros_like(owned_pull_now)
        push_now = push_late = np.zeros_like(push_now)
        pushed = np.zeros_like(in_group)
    early_rows, early_recv = _by_owner(owners, ~pull_now, num_ranks)
    now_rows, now_recv = _by_owner(owners, pull_now, num_ranks)
    push_rows, push_send = _by_owner(owners, push_now, num_ranks)
    late_rows, late_send = _by_owner(owners, push_late, num_ranks)
    arrival = np.empty(len(owners), dtype=np.int32)
    arrival[early_rows] = np.arange(len(early_rows), dtype=np.int32)
    arrival[now_rows] = np.arange(len(early_rows), len(owners), dtype=np.int32)

    return _PreparedExchange(
        exchange=GroupExchange(
            prepull=_pull_part(exchange, in_group & ~owned_pull_now, early_recv, 0, upload),
            pull=_pull_part(exchange, in_group & owned_pull_now, now_recv, len(early_rows), upload),
            push=_push_part(exchange, pushed & exchange.owned_push_now, push_send, upload),
            push_late=_push_part(exchange, pushed & ~exchange.owned_push_now, late_send, upload),
            owned=_slot_rows(exchange, in_group, upload),
        ),
        arrival=arrival,
        pushed=(push_rows, late_rows),
        backward=(upload.segment_sum(segment_sum.select(push_rows)), upload.segment_sum(segment_sum.select(late_rows))),
    )


def _by_owner(
    owners: NDArray[np.uint16], chosen: NDArray[np.bool_], num_ranks: int
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Positions of the chosen rows, owner by owner, ascending for each owner; and the number per owner."""
    rows = np.flatnonzero(chosen)
    of_rows = owners[rows]
    return rows[np.argsort(of_rows, kind="stable")], tuple(np.bincount(of_rows, minlength=num_ranks).tolist())


def _served(exchange: ExchangePlan, chosen: NDArray[np.bool_]) -> tuple[Int32, tuple[int, ...]]:
    """Chosen served rows, as positions among the owned rows; and the number per consumer."""
    keep = chosen[exchange.serve_rows]
    before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=before[1:])
    return exchange.serve_rows[keep], tuple(np.diff(before[exchange.serve_offsets]).tolist())


def _pull_part(
    exchange: ExchangePlan, chosen: NDArray[np.bool_], recv_counts: tuple[int, ...], first: int, upload: Uploader
) -> PullPart:
    rows, send_counts = _served(exchange, chosen)
    slot_index = upload.tensor(exchange.owned_slots[rows].astype(np.int64))
    return PullPart(slot_index=slot_index, send_counts=send_counts, recv_counts=recv_counts, first=first)


def _push_part(
    exchange: ExchangePlan, chosen: NDArray[np.bool_], send_counts: tuple[int, ...], upload: Uploader
) -> PushPart:
    rows, recv_counts = _served(exchange, chosen)
    number = np.cumsum(chosen, dtype=np.int32)
    numbers = number[rows] - np.int32(1)
    row_starts = np.zeros(int(number[-1]) + 1 if len(number) else 1, dtype=np.int32)
    np.cumsum(np.bincount(numbers, minlength=len(row_starts) - 1), out=row_starts[1:])
    # A stable sort keeps the contributions to each row in rank order.
    segment_sum = HostSegmentSum(row_starts=row_starts, sources=np.argsort(numbers, kind="stable").astype(np.int32))
    return PushPart(
        send_counts=send_counts,
        recv_counts=recv_counts,
        owned=_slot_rows(exchange, chosen, upload),
        segment_sum=upload.segment_sum(segment_sum),
    )


def _slot_rows(exchange: ExchangePlan, chosen: NDArray[np.bool_], upload: Uploader) -> SlotRows:
    positions = np.flatnonzero(chosen)
    return upload.slot_rows(select_rows(exchange.owned, positions), exchange.owned_slots[positions])
