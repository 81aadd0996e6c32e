"""`Anomaly`: what the checker looks for in a history, and `Finding`: one occurrence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Anomaly", "Finding"]


class Anomaly(Enum):
    """Kinds of anomalies. The values are those of reports."""

    #: A row was read that no single write made: two writes mixed, a wrong check word, a wrong seal.
    TORN_ROW = "torn-row"
    #: A read has a number that was never appended to the row, or whose append began after the read had ended.
    PHANTOM_READ = "phantom-read"
    #: A read has the number of an append that was refused before anything was sent.
    DIRTY_READ = "dirty-read"
    #: A list has a number twice: an append that was sent again was executed twice.
    DUPLICATED_APPEND = "duplicated-append"
    #: An acknowledged append is absent from a read that began later, and from all reads after that one.
    LOST_WRITE = "lost-write"
    #: A read lacks an append that was acknowledged before it began, and later reads have it; or one that a read that
    #: had ended before it began had seen.
    STALE_READ = "stale-read"
    #: Two reads of a row, without a loss or an undo between them, of which neither list is the beginning of the other.
    INCOMPATIBLE_ORDER = "incompatible-order"
    #: An append that began after another job had acquired the namespace was acknowledged or read; or one that began
    #: before it became visible only afterwards.
    FENCED_WRITE = "fenced-write"
    #: One read has an append in one row of a bucket, and not in another row of that bucket that the append wrote too.
    PARTIAL_GROUP = "partial-group"
    #: A read after a takeover that set the rows to a checkpoint has an append of an earlier job beyond the checkpoint.
    NOT_UNDONE = "not-undone"
    #: A writer that had lost acknowledged groups got a later write, rotation or commit acknowledged; or a client that
    #: was connected to a server before it was started again read its loss as if nothing had happened.
    UNNOTICED_LOSS = "unnoticed-loss"
    #: A loss took an acknowledged append, and left a later one of the same bucket.
    GAP = "gap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One anomaly.

    Attributes:
        anomaly: its kind.
        row: the row, -1 if it concerns none.
        number: of the append, 0 if it concerns none.
        operations: orders of the invocations that show it.
    """

    anomaly: Anomaly
    row: int = -1
    number: int = 0
    operations: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [self.anomaly.value]
        if self.row >= 0:
            parts.append(f"row {self.row}")
        if self.number:
            parts.append(f"append {self.number}")
        return f"{', '.join(parts)}; operations {', '.join(map(str, self.operations))}"
