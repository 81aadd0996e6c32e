"""What the store promises where a server may lose acknowledged groups: the loss is noticed, and keeps a prefix. Pure.

*Noticed*: a log that has lost a group is too short, so the writer gets no later acknowledgement in that bucket, no
rotation and no commit (`bagpipe.store.fencing.fence`). Clients of a server that is started again must connect anew.
*Prefix*: a server that has lost commands has lost the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.harness.histories.anomalies import Anomaly, Finding
from tests.harness.histories.events import Phase
from tests.harness.histories.history import Append, History, Loss, Read

__all__ = ["gaps", "unnoticed_losses"]


def unnoticed_losses(history: History) -> Iterator[Finding]:
    """Acknowledgements that a writer gets after a loss of its groups, and reads of a client from before it."""
    for loss, append, row, read in _lost(history):
        for later in history.appends:
            is_same = (later.job, later.writer) == (append.job, append.writer)
            in_bucket = any(history.buckets[each] == history.buckets[row] for each in later.rows)
            if is_same and in_bucket and later.phase is Phase.OK and later.start > loss.end:
                yield _finding(Anomaly.UNNOTICED_LOSS, append, row, read, later.start)
        for proof in history.proofs:
            if proof.job == append.job and append.writer in proof.writers and proof.start > loss.end:
                yield _finding(Anomaly.UNNOTICED_LOSS, append, row, read, proof.start)
        if loss.restarts and any(order < loss.start for order in history.sessions.get(read.process, ())):
            yield _finding(Anomaly.UNNOTICED_LOSS, append, row, read, loss.start)


def gaps(history: History) -> Iterator[Finding]:
    """Appends that a loss left, although it took one of the same bucket that was acknowledged before they began."""
    for loss, append, row, read in _lost(history):
        if not loss.keeps_prefix or append.end > loss.start:
            continue
        for other, numbers in read.lists.items():
            if history.buckets[other] != history.buckets[row]:
                continue
            for number in numbers:
                kept = history.numbered.get(number)
                if kept is not None and append.end < kept.start < loss.start:
                    yield _finding(Anomaly.GAP, append, row, read, kept.start)


def _lost(history: History) -> Iterator[tuple[Loss, Append, int, Read]]:
    """Acknowledged appends that are absent from a read after a loss, for no other reason."""
    for loss in history.losses:
        others = [each for each in history.losses if each is not loss]
        for append in history.appends:
            if append.phase is not Phase.OK or append.start > loss.end:
                continue
            for row in sorted(append.rows & loss.rows):
                for read in history.reads:
                    if read.start < max(loss.end, append.end) or append.number in read.lists.get(row, (append.number,)):
                        continue
                    is_undone = any(undo.start < read.end and over > append.start for undo, over in history.undoes)
                    if not is_undone and not any(each.covers(row, append.start, read.end) for each in others):
                        yield loss, append, row, read


def _finding(anomaly: Anomaly, append: Append, row: int, read: Read, other: int) -> Finding:
    operations = tuple(sorted({append.start, read.start, other}))
    return Finding(anomaly=anomaly, row=row, number=append.number, operations=operations)
