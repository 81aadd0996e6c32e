"""`check`: the anomalies of a history. Pure: no I/O, no clock; equal histories give equal findings.

    History ──> one read:    torn, phantom, dirty, duplicated, partial group
            ──> its past:    lost, stale, not undone        (what the store must hold when the read begins)
            ──> two reads:   incompatible order, stale
            ──> two jobs:    fenced write
            ──> a loss:      unnoticed, gap                 (`tests.harness.histories.losses`)

It finds only what cannot be explained. A read took its lists at some order in ``[start, end]``, an append had its
effect at some order between its start and its end. A *break* of a row is a loss, or a takeover that sets rows to a
checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import chain, pairwise

from tests.harness.histories.anomalies import Anomaly, Finding
from tests.harness.histories.events import Phase
from tests.harness.histories.history import NEVER, Append, History, Read, TakeOver
from tests.harness.histories.losses import gaps, unnoticed_losses

__all__ = ["check"]


def check(history: History) -> tuple[Finding, ...]:
    """The findings, in the order of `Anomaly`; of each kind, row and append the first one."""
    found: dict[tuple[Anomaly, int, int], Finding] = {}
    for finding in chain.from_iterable(rule(history) for rule in _RULES):
        found.setdefault((finding.anomaly, finding.row, finding.number), finding)
    order = list(Anomaly)
    return tuple(sorted(found.values(), key=lambda each: (order.index(each.anomaly), each.row, each.number)))


def _torn(history: History) -> Iterator[Finding]:
    for read in history.reads:
        for row in read.torn:
            yield Finding(anomaly=Anomaly.TORN_ROW, row=row, operations=(read.start,))


def _unexplained(history: History) -> Iterator[Finding]:
    """Numbers that a list cannot have: phantoms, refused appends, duplicates."""
    for read in history.reads:
        for row, numbers in read.lists.items():
            for number in sorted(set(numbers)):
                append = history.numbered.get(number)
                if append is None or row not in append.rows or append.start > read.end:
                    yield Finding(anomaly=Anomaly.PHANTOM_READ, row=row, number=number, operations=(read.start,))
                elif append.phase is Phase.FAIL:
                    yield _finding(Anomaly.DIRTY_READ, row, append, read)
                if numbers.count(number) > 1:
                    yield Finding(anomaly=Anomaly.DUPLICATED_APPEND, row=row, number=number, operations=(read.start,))


def _partial_groups(history: History) -> Iterator[Finding]:
    """Groups seen in part: a group, the rows of one write in one bucket, is promised to be visible whole."""
    for append in history.appends:
        for rows in _groups(history, append):
            for read in history.reads:
                seen = [append.number in read.lists[row] for row in rows if row in read.lists]
                if len(set(seen)) < 2:
                    continue
                row = next(row for row in rows if row in read.lists and append.number not in read.lists[row])
                if not _is_broken(history, row, append.start, read.end):
                    yield _finding(Anomaly.PARTIAL_GROUP, row, append, read)


def _groups(history: History, append: Append) -> list[list[int]]:
    """The rows of an append by bucket, where these are several."""
    groups: dict[int, list[int]] = {}
    for row in sorted(append.rows):
        groups.setdefault(history.buckets[row], []).append(row)
    return [rows for rows in groups.values() if len(rows) > 1]


def _missing(history: History) -> Iterator[Finding]:
    """Lost writes, stale reads, and appends that a takeover should have undone."""
    acknowledged: dict[int, list[Append]] = {}
    for append in history.appends:
        for row in append.rows:
            acknowledged.setdefault(row, []).append(append)
    for read in history.reads:
        for row, numbers in read.lists.items():
            if any(undo.start < read.end and over > read.start for undo, over in history.undoes):
                continue  # rows are being set
            last = _last_undo(history, read)
            restored = () if last is None or last.checkpoint is None else last.checkpoint.get(row, ())
            seen = set(numbers)
            for append in acknowledged.get(row, []):
                # When its effect was there: since its start, or since the takeover that set the row to it.
                if last is None or append.start > last.acquired:
                    start, is_due = append.start, append.phase is Phase.OK and append.end < read.start
                else:
                    start, is_due = last.start, append.number in restored
                    is_undone = append.job < last.job and not is_due and not _is_lost(history, row, start, read.end)
                    if is_undone and append.number in seen:
                        yield _finding(Anomaly.NOT_UNDONE, row, append, read, last.start)
                if is_due and append.number not in seen and not _is_lost(history, row, start, read.end):
                    is_stale = any(
                        later.start > read.end and append.number in later.lists.get(row, ()) for later in history.reads
                    )
                    yield _finding(Anomaly.STALE_READ if is_stale else Anomaly.LOST_WRITE, row, append, read)


def _is_lost(history: History, row: int, start: int, end: int) -> bool:
    return any(loss.covers(row, start, end) for loss in history.losses)


def _last_undo(history: History, read: Read) -> TakeOver | None:
    done = [undo for undo, _ in history.undoes if undo.end < read.start]
    return max(done, key=lambda undo: undo.end, default=None)


def _orders(history: History) -> Iterator[Finding]:
    """Reads of one row between two breaks: each list begins with each shorter one, and lists never get shorter."""
    rows = {row for read in history.reads for row in read.lists}
    for row in sorted(rows):
        segments: dict[tuple[int, ...], list[Read]] = {}
        breaks = _breaks(history, row)
        for read in history.reads:
            if row in read.lists and not any(start < read.end and end > read.start for start, end in breaks):
                segments.setdefault(tuple(end < read.start for _, end in breaks), []).append(read)
        for reads in segments.values():
            yield from _chain(row, reads)


def _chain(row: int, reads: list[Read]) -> Iterator[Finding]:
    for short, long in pairwise(sorted(reads, key=lambda read: len(read.lists[row]))):
        numbers = short.lists[row]
        if long.lists[row][: len(numbers)] != numbers:
            operations = tuple(sorted((short.start, long.start)))
            yield Finding(anomaly=Anomaly.INCOMPATIBLE_ORDER, row=row, operations=operations)
            return  # one break of the chain shows in many pairs
    by_end = sorted(reads, key=lambda read: read.end)
    ends = [read.end for read in by_end]
    longest: list[Read] = []
    for read in by_end:
        is_longer = not longest or len(read.lists[row]) > len(longest[-1].lists[row])
        longest.append(read if is_longer else longest[-1])
    for read in reads:
        earlier = bisect_left(ends, read.start) - 1
        if earlier >= 0 and len(longest[earlier].lists[row]) > len(read.lists[row]):
            number = longest[earlier].lists[row][len(read.lists[row])]
            operations = (longest[earlier].start, read.start)
            yield Finding(anomaly=Anomaly.STALE_READ, row=row, number=number, operations=operations)
            return


def _breaks(history: History, row: int) -> list[tuple[int, int]]:
    losses = [(loss.start, loss.end) for loss in history.losses if row in loss.rows]
    return losses + [(undo.start, over) for undo, over in history.undoes]


def _is_broken(history: History, row: int, start: int, end: int) -> bool:
    return any(first < end and last > start for first, last in _breaks(history, row))


def _fenced_writes(history: History) -> Iterator[Finding]:
    """Writes that a takeover should have kept out. A loss may take the takeover itself from the servers of a row."""
    for append in history.appends:
        after = [each for each in history.takeovers if each.job > append.job and each.acquired != NEVER]
        if not after:
            continue
        first_after = min(after, key=lambda each: each.acquired)
        start, acquired = first_after.start, first_after.acquired
        for row in sorted(append.rows):
            reads = [read for read in history.reads if row in read.lists]
            seen = [read for read in reads if append.number in read.lists[row]]
            if append.start > acquired:
                ends = [append.end] if append.phase is Phase.OK else [read.end for read in seen[:1]]
                if ends and not _is_lost(history, row, start, ends[0]):
                    operations = (acquired, append.start, *(read.start for read in seen[:1]))
                    yield Finding(anomaly=Anomaly.FENCED_WRITE, row=row, number=append.number, operations=operations)
                continue
            without = [read for read in reads if append.number not in read.lists[row] and read.start > acquired]
            first = min(without, key=lambda read: read.end, default=None)
            later = [read for read in seen if first is not None and read.start > first.end]
            if first is None or not later or _is_broken(history, row, append.start, later[0].end):
                continue
            if append.phase is Phase.OK and append.end < first.start:
                continue  # a stale read of a write that was there before
            yield _finding(Anomaly.FENCED_WRITE, row, append, later[0], acquired)


def _finding(anomaly: Anomaly, row: int, append: Append, read: Read, *others: int) -> Finding:
    operations = tuple(sorted({append.start, read.start, *others}))
    return Finding(anomaly=anomaly, row=row, number=append.number, operations=operations)


_RULES: tuple[Callable[[History], Iterator[Finding]], ...] = (
    _torn,
    _unexplained,
    _partial_groups,
    _missing,
    _orders,
    _fenced_writes,
    unnoticed_losses,
    gaps,
)
