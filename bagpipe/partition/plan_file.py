"""`PlanFile`: a plan of stages as a file that people read: schedule, and per stage operators, ranks and micro-batches.

    Partition ──plan_file──> PlanFile ──to_toml──> FILE ──from_toml──> PlanFile ──pipeline.plan──> a job

Needs neither numpy nor torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from bagpipe.errors import InputError
from bagpipe.partition.result import Partition
from bagpipe.partition.splits import ALL_BATCH
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.types.shard_level import SHARD_LEVELS
from bagpipe.util.documents import toml_tables

__all__ = ["PlanFile", "PlannedStage", "plan_file"]

_VERSION = 2
_KEYS = ("version", "schedule", "batch_size", "stages")
#: Since version 2, with the values of files that do not have them.
_MORE_KEYS: Mapping[str, Any] = {"shard": "none", "budget_bytes": 0, "step_s": 0.0}
_STAGE_KEYS = ("operators", "replicas", "ranks", "microbatches", "layout")
_MORE_STAGE_KEYS: Mapping[str, Any] = {"recompute": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage.

    Attributes:
        operators: names of the operators, or of modules that contain them.
        ranks: that hold it, each with a part of every micro-batch.
        microbatches: per batch.
        layout: ``batch``: its ranks divide the examples.
        recompute: share of its micro-batches whose activations are recomputed, 0 to 1.
    """

    operators: tuple[str, ...]
    ranks: tuple[int, ...]
    microbatches: int
    layout: str = "batch"
    recompute: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan.

    Attributes:
        schedule: name of a synchronous dense schedule with one stage per rank.
        batch_size: examples of a batch, for which it was made.
        stages: by number.
        shard: division of each stage's parameters among its ranks, as `dense.shard`.
        budget_bytes: most bytes of the dense part on a device, as `dense.budget_bytes`; 0: no limit.
        step_s: predicted seconds of a step; 0: none.

    Raises:
        InputError: a value is out of range, an operator is in two stages, or the ranks are not 0, 1, … by stage.
    """

    schedule: str
    batch_size: int
    stages: tuple[PlannedStage, ...]
    shard: str = "none"
    budget_bytes: int = 0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in DENSE_SCHEDULES:
            raise InputError(f"schedule: expected one of {', '.join(DENSE_SCHEDULES)}, got {self.schedule!r}")
        schedule = DENSE_SCHEDULES[self.schedule]
        if schedule.chunks > 1 or schedule.num_pipes > 1:
            raise InputError(f"schedule: expected one with one stage per rank, got {self.schedule!r}")
        if self.batch_size < 1:
            raise InputError(f"batch_size: expected at least 1, got {self.batch_size}")
        if not self.stages:
            raise InputError("stages: expected at least one, got none")
        if self.shard not in SHARD_LEVELS:
            raise InputError(f"shard: expected one of {', '.join(SHARD_LEVELS)}, got {self.shard!r}")
        if self.budget_bytes < 0:
            raise InputError(f"budget_bytes: expected at least 0, got {self.budget_bytes}")
        if not 0 <= self.step_s < math.inf:
            raise InputError(f"step_s: expected at least 0, got {self.step_s}")
        seen: dict[str, int] = {}
        first = 0
        for number, stage in enumerate(self.stages):
            expected = tuple(range(first, first + max(1, len(stage.ranks))))
            if stage.ranks != expected:
                raise InputError(
                    f"stage {number}: ranks: expected {list(expected)}, the next after those of the stages before, "
                    f"got {list(stage.ranks)}"
                )
            first = expected[-1] + 1
            if stage.microbatches < 1:
                raise InputError(f"stage {number}: microbatches: expected at least 1, got {stage.microbatches}")
            if stage.layout != "batch":
                raise InputError(
                    f"stage {number}: layout: ranks divide examples: expected 'batch', got {stage.layout!r}"
                )
            if not 0 <= stage.recompute <= 1:
                raise InputError(f"stage {number}: recompute: expected 0 to 1, got {stage.recompute}")
            if not stage.operators:
                raise InputError(f"stage {number}: operators: expected at least one, got none")
            for name in stage.operators:
                if name in seen:
                    raise InputError(f"stage {number}: operator {name!r} is in stage {seen[name]} already")
                seen[name] = number

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each stage."""
        return tuple(stage.microbatches for stage in self.stages)

    def to_toml(self) -> str:
        """The file's text; `from_toml` is its inverse."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# Stages of a model, as `python -m bagpipe plan --out` writes them and `pipeline.plan` runs them."
        yield f"version = {_VERSION}"
        yield f"schedule = {json.dumps(self.schedule)}"
        yield f"batch_size = {self.batch_size}"
        yield f"shard = {json.dumps(self.shard)}"
        yield f"budget_bytes = {self.budget_bytes}"
        yield f"step_s = {self.step_s!r}"
        for stage in self.stages:
            yield ""
            yield "[[stages]]"
            yield "operators = ["
            yield from (f"    {json.dumps(name)}," for name in stage.operators)
            yield "]"
            yield f"replicas = {len(stage.ranks)}"
            yield f"ranks = {list(stage.ranks)}"
            yield f"microbatches = {stage.microbatches}"
            yield f"layout = {json.dumps(stage.layout)}"
            yield f"recompute = {stage.recompute!r}"

    @classmethod
    def from_toml(cls, text: str, *, source: str) -> PlanFile:
        """The plan that a file holds.

        Args:
            text: of the file.
            source: its name, for errors.

        Raises:
            InputError: one line: what was expected and what came.
        """
        document = toml_tables(text, source=source)
        try:
            document = _checked(document, _KEYS, _MORE_KEYS)
            if document["version"] not in (1, _VERSION):
                raise InputError(f"version: expected 1 or {_VERSION}, got {document['version']!r}")
            return cls(
                schedule=_of(document, "schedule", str),
                batch_size=_of(document, "batch_size", int),
                stages=tuple(_stage(number, table) for number, table in enumerate(_of(document, "stages", list))),
                shard=_of(document, "shard", str),
                budget_bytes=_of(document, "budget_bytes", int),
                step_s=_number_of(document, "step_s"),
            )
        except InputError as error:
            raise InputError(f"{source}: {error}") from None


def plan_file(partition: Partition, batch_size: int) -> PlanFile:
    """The file of a planner's result; the ranks are numbered by stage.

    Raises:
        InputError: a stage divides an operator in another way than by examples, which jobs do not run.
    """
    for number, stage in enumerate(partition.stages):
        other = next((each for each in zip(stage.operators, stage.splits, strict=False) if each[1] != ALL_BATCH), None)
        if other is not None:
            raise InputError(
                f"stage {number}: jobs divide every operator by examples (split batch), but the plan divides "
                f"{other[0]!r} by split {other[1]}; plan without --intra-operator"
            )
    ranks = chain.from_iterable([number] * stage.replicas for number, stage in enumerate(partition.stages))
    owners = list(ranks)
    return PlanFile(
        schedule=partition.schedule,
        batch_size=batch_size,
        step_s=partition.step_s,
        stages=tuple(
            PlannedStage(
                operators=stage.operators,
                ranks=tuple(rank for rank, owner in enumerate(owners) if owner == number),
                microbatches=stage.microbatches,
                recompute=stage.recompute,
            )
            for number, stage in enumerate(partition.stages)
        ),
    )


def _stage(number: int, table: Any) -> PlannedStage:
    try:
        if not isinstance(table, dict):
            raise InputError(f"expected a table [[stages]], got {table!r}")
        table = _checked(table, _STAGE_KEYS, _MORE_STAGE_KEYS)
        operators, ranks = _of(table, "operators", list), _of(table, "ranks", list)
        for key, values, kind in (("operators", operators, str), ("ranks", ranks, int)):
            if any(type(value) is not kind for value in values):
                raise InputError(f"{key}: expected {_WORDS[kind]}s, got {values!r}")
        if len(ranks) != _of(table, "replicas", int):
            raise InputError(f"ranks: expected {table['replicas']}, as many as replicas, got {ranks!r}")
        return PlannedStage(
            operators=tuple(operators),
            ranks=tuple(ranks),
            microbatches=_of(table, "microbatches", int),
            layout=_of(table, "layout", str),
            recompute=_number_of(table, "recompute"),
        )
    except InputError as error:
        raise InputError(f"stage {number}: {error}") from None


_WORDS: Mapping[type, str] = {str: "string", int: "whole number", list: "list"}


def _of(table: Mapping[str, Any], key: str, kind: type) -> Any:
    value = table[key]
    if type(value) is not kind:
        raise InputError(f"{key}: expected a {_WORDS[kind]}, got {value!r}")
    return value


def _number_of(table: Mapping[str, Any], key: str) -> float:
    value = table[key]
    if type(value) not in (int, float):
        raise InputError(f"{key}: expected a number, got {value!r}")
    return float(value)


def _checked(table: Mapping[str, Any], keys: tuple[str, ...], more: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the values of optional keys."""
    unknown = next((key for key in table if key not in keys and key not in more), None)
    if unknown is not None:
        raise InputError(f"unknown key {unknown}; expected {', '.join((*keys, *more))}")
    missing = next((key for key in keys if key not in table), None)
    if missing is not None:
        raise InputError(f"expected the key {missing}, got none")
    return {**more, **table}
