"""What tables and pictures take from the records of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["TITLES", "Key", "Records", "Scores", "by_key", "jobs_of"]

Records: TypeAlias = Sequence[Mapping[str, Any]]
#: Schedule, stages, micro-batches, `pipeline.rows_delay`.
Key: TypeAlias = tuple[str, int, int, int]
Scores: TypeAlias = Sequence[Mapping[str, float]]

#: Parts with the quality of all schedules.
TITLES: Mapping[str, str] = {
    "sample": "Criteo Terabyte sample",
    "synthetic": "synthetic Criteo Kaggle",
    "synthetic-small": "synthetic Criteo Kaggle",
    "movielens": "synthetic ratings like MovieLens'",
}


def by_key(records: Records) -> dict[Key, dict[int, Scores]]:
    """Key -> seed -> scores."""
    found: dict[Key, dict[int, Scores]] = {}
    for record in records:
        run = record["run"]
        key = (run["schedule"], run["stages"], run["microbatches"], run.get("rows_delay", 0))
        found.setdefault(key, {})[run["seed"]] = record["scores"]
    return found


def jobs_of(rounds: Records) -> list[str]:
    """The jobs of a part with rounds, ``schedule/rows_delay``; the first is what others are compared with."""
    return [name for name, found in rounds[0].items() if isinstance(found, dict)]
