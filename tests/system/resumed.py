"""A small job with checkpoints that is started repeatedly on one folder, and its expected digests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.programs import Done, run_forked

__all__ = ["JOB", "SIX_TABLES", "Resumed", "digests"]

#: Six of Criteo's tables: all 26 take half as long again, mostly to list each table's rows.
SIX_TABLES = str(Path(__file__).with_name("six_tables.toml"))

#: 22 training batches; rows leave the small cache all the time.
JOB = [
    "--data.schema", SIX_TABLES, "--data.limit", "3000", "--data.batch_size", "128", "--data.workers", "0",
    "--model.embedding_dim", "4", "--model.bottom_mlp", "6", "--model.top_mlp", "5", "--oracle.lookahead", "5",
    "--cache.rows", "500", "--store.buckets", "8",
]  # fmt: skip


def digests(result: Path) -> tuple[str, str, float | None, float | None]:
    """Dense and embedding digest, loss and AUC."""
    values = json.loads(result.read_text())
    return values["dense_digest"], values["embedding_digest"], values["loss"], values["auc"]


@dataclass(slots=True, kw_only=True)
class Resumed:
    """Starts of one job, each in its own process.

    Attributes:
        folder: the test's; the checkpoints are in ``folder/checkpoints``.
        arguments: of every start.
    """

    folder: Path
    arguments: Sequence[str] = ()
    namespace: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def settings(self, *more: str) -> list[str]:
        own = ["--checkpoint.dir", str(self.checkpoints), "--store.namespace", self.namespace]
        return [*JOB, "--checkpoint.every", "5", *own, *self.arguments, *more]

    def line(self, *more: str) -> list[str]:
        return [*self.settings(*more), "--result", str(self.result)]

    def run(self, *more: str, dies_at: str = "") -> Done:
        """Run one start to its end, or until it dies at a failpoint."""
        self.result.unlink(missing_ok=True)
        return run_forked(self.line(*more), self.folder, {"BAGPIPE_CRASH_AT": dies_at} if dies_at else {})

    def resumed_from(self) -> int | None:
        step: int | None = json.loads(self.result.read_text())["resumed_from"]
        return step

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder."""
        return sorted(
            int(path.parent.name.removeprefix("step-")) for path in self.checkpoints.glob("*/*/manifest.json")
        )
