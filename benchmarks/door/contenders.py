"""Input and output of a trial, and the table of contenders. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BASELINE", "CONTENDERS", "Outcome", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Input of a trial.

    Attributes:
        contender: name.
        repeat: number of this run of the contender.
        setting: of benchmarks/peers.
        data: `data` section of the configuration: path, format, limit.
        url: of the store's server.
        fill_url: of the same server, past the link.
        server_pid: process id of the server.
        port: of torchrec's process group.
    """

    contender: str
    repeat: int
    setting: str
    data: Mapping[str, Any]
    url: str
    fill_url: str
    server_pid: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Output of a trial.

    Attributes:
        contender, repeat: as in the task.
        step_s: seconds of the measured steps.
        loss: mean over the measured steps; None: not known step by step.
        own_cores, other_cores: cores used by the contender with its server, and by other jobs.
    """

    contender: str
    repeat: int
    step_s: tuple[float, ...]
    loss: float | None
    own_cores: float
    other_cores: float


#: Contender -> (what it is, the target of its ratio to the baseline).
CONTENDERS: Mapping[str, tuple[str, float | None]] = {
    "trainer": ("the training program's loop: cacher process, engine, RedisStore", None),
    "process": ('TrainPipeline over a DataLoader of prepared batches, planner="process"', 1.03),
    "inline": ('the same, planner="inline"', 1.25),
    "torchrec": ("torchrec's TrainPipelineSparseDist, all rows in memory", None),
}
BASELINE = "trainer"
