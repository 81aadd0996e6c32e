"""`Story`: histories written by hand, one operation after the other or overlapping, for tests of the checker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.harness.histories.anomalies import Anomaly
from tests.harness.histories.checker import check
from tests.harness.histories.events import Event, Kind, Phase, Recorder
from tests.harness.histories.history import paired

__all__ = ["Story"]


class Story:
    """A history of four rows: rows 0 and 1 are in bucket 0, rows 2 and 3 in bucket 1."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.invoke("plan", Kind.SETTING, server="memory", seed=0, buckets={0: 0, 1: 0, 2: 1, 3: 1})

    def append(self, *rows: int, job: int = 1, writer: int = 0, phase: Phase = Phase.OK) -> int:
        """A whole append. Returns its number."""
        return self.end(self.begin_append(*rows, job=job, writer=writer), phase)

    def begin_append(self, *rows: int, job: int = 1, writer: int = 0) -> Event:
        """The invocation of an append."""
        return self.recorder.invoke_append(f"writer-{job}-{writer}", job=job, writer=writer, rows=list(rows))

    def end(self, invoked: Event, phase: Phase = Phase.OK, **facts: Any) -> int:
        """The completion of an operation. Returns the number of an append, else 0."""
        self.recorder.complete(invoked, phase, **facts)
        return int(invoked.facts.get("number", 0))

    def read(self, lists: Mapping[int, Sequence[int]], *, process: str = "reader", torn: Sequence[int] = ()) -> None:
        """A whole read of these lists."""
        self.end_read(self.begin_read(process=process), lists, torn=torn)

    def begin_read(self, *, process: str = "reader") -> Event:
        """The invocation of a read."""
        return self.recorder.invoke(process, Kind.READ)

    def end_read(self, invoked: Event, lists: Mapping[int, Sequence[int]], *, torn: Sequence[int] = ()) -> None:
        """The completion of a read."""
        self.recorder.complete(
            invoked, Phase.OK, lists={row: list(numbers) for row, numbers in lists.items()}, torn=list(torn)
        )

    def take_over(self, job: int, checkpoint: Mapping[int, Sequence[int]] | None = None) -> None:
        """A whole takeover."""
        self.end(self.begin_take_over(job, checkpoint))

    def begin_take_over(self, job: int, checkpoint: Mapping[int, Sequence[int]] | None = None) -> Event:
        """A takeover up to the acquisition."""
        facts: dict[str, Any] = {"job": job}
        if checkpoint is not None:
            facts["checkpoint"] = {row: list(numbers) for row, numbers in checkpoint.items()}
        invoked = self.recorder.invoke("job", Kind.TAKE_OVER, **facts)
        self.recorder.invoke("job", Kind.ACQUIRED, job=job)
        return invoked

    def prove(self, job: int = 1, *writers: int) -> None:
        """A rotation or commit."""
        self.end(self.recorder.invoke("job", Kind.PROOF, job=job, writers=list(writers) or [0]))

    def begin_loss(self, *rows: int, keeps_prefix: bool = True, restarts: bool = False) -> Event:
        """The begin of a loss of rows."""
        return self.recorder.invoke("nemesis", Kind.LOSS, rows=list(rows), keeps_prefix=keeps_prefix, restarts=restarts)

    def lose(self, *rows: int, restarts: bool = False) -> None:
        """A whole loss of rows."""
        self.end(self.begin_loss(*rows, restarts=restarts))

    def anomalies(self) -> set[Anomaly]:
        """Kinds of anomalies that the checker finds."""
        return {finding.anomaly for finding in check(paired(self.recorder.events))}
