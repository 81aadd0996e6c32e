"""`JobRecord`: the job that made a namespace's rows, and how it ended. Stored beside the rows by the `Ledger`.

    job ──claim──> running ──end──> finished | stopped | failed        hash <namespace>:{0}:job, for `redis-cli HGETALL`

No I/O. A killed job leaves `running`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, cast, get_args

__all__ = ["JobRecord", "JobState"]

JobState: TypeAlias = Literal["running", "finished", "stopped", "failed"]

_ENDS: dict[JobState, str] = {
    "running": "has not recorded its end (it still runs, or was killed)",
    "finished": "finished after {steps} steps",
    "stopped": "was interrupted after {steps} steps",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job of a namespace.

    Attributes:
        job: lineage of its checkpoints, or 32 random hexadecimal digits.
        has_checkpoints: it has a checkpoint folder.
        state: how it ended.
        steps: batches trained; 0 while it runs and after a failure.
        dense_digest: digest of the dense part that belongs to the rows; empty until the job finishes or is interrupted.
        num_rows: rows of the namespace when the job finished or was interrupted; None before.
        deletes_rows: rows expire in it, so logs of changes can be there without rows; None: of an earlier release.
    """

    job: str
    has_checkpoints: bool
    state: JobState = "running"
    steps: int = 0
    dense_digest: str = ""
    num_rows: int | None = None
    deletes_rows: bool | None = None

    def to_fields(self) -> dict[str, str]:
        """Fields of the record's hash."""
        return {
            "job": self.job,
            "checkpoints": "yes" if self.has_checkpoints else "no",
            "state": self.state,
            "steps": str(self.steps),
            "dense_digest": self.dense_digest,
            **({} if self.num_rows is None else {"rows": str(self.num_rows)}),
            **({} if self.deletes_rows is None else {"deletes": "yes" if self.deletes_rows else "no"}),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self | None:
        """Inverse of `to_fields`; None for anything else."""
        state, steps, rows = fields.get("state", ""), fields.get("steps", ""), fields.get("rows", "0")
        if not fields.get("job") or state not in get_args(JobState) or not (steps.isdecimal() and rows.isdecimal()):
            return None
        return cls(
            job=fields["job"],
            has_checkpoints=fields.get("checkpoints") == "yes",
            state=cast(JobState, state),
            steps=int(steps),
            dense_digest=fields.get("dense_digest", ""),
            num_rows=int(rows) if "rows" in fields else None,
            deletes_rows=fields["deletes"] == "yes" if "deletes" in fields else None,
        )

    def describe(self) -> str:
        """The job and its end, for messages."""
        dense = f", dense digest {self.dense_digest[:8]}" if self.dense_digest else ""
        return f"job {self.job[:8]}, which {_ENDS[self.state].format(steps=self.steps)}{dense}"
