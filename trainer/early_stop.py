"""`EvaluationHistory`: the evaluations of a job, the best of them, and when to stop. Pure; checkpoints keep it.

evaluation ──after──> history: best step and value, evaluations since ──patience──> stop?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.config.sections import EvalConfig
from bagpipe.errors import InputError

__all__ = ["Evaluation", "EvaluationHistory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Metrics of the held-out examples after some steps.

    Attributes:
        step: batches trained before.
        metrics: value by name; None without a value.
    """

    step: int
    metrics: Mapping[str, float | None]

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, **self.metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationHistory:
    """All evaluations so far.

    Attributes:
        evaluations: in the order of their steps.
        best_step, best_value: of the best one; None before the first that has a value.
        num_worse: evaluations since the best one.
    """

    evaluations: tuple[Evaluation, ...] = ()
    best_step: int | None = None
    best_value: float | None = None
    num_worse: int = 0

    @property
    def last_step(self) -> int | None:
        """Step of the latest evaluation."""
        return self.evaluations[-1].step if self.evaluations else None

    def after(self, evaluation: Evaluation, settings: EvalConfig, *, higher_is_better: bool) -> EvaluationHistory:
        """The history with one more evaluation. One without a value for the metric is not better."""
        evaluations = (*self.evaluations, evaluation)
        value = evaluation.metrics.get(settings.metric)
        if value is not None and self._is_better(value, settings.min_delta, higher_is_better=higher_is_better):
            return EvaluationHistory(evaluations=evaluations, best_step=evaluation.step, best_value=value)
        return dataclasses.replace(self, evaluations=evaluations, num_worse=self.num_worse + 1)

    def is_over(self, settings: EvalConfig) -> bool:
        """Patience has run out."""
        return bool(settings.patience) and self.num_worse >= settings.patience

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {
            "evaluations": [evaluation.to_json() for evaluation in self.evaluations],
            "best_step": self.best_step,
            "best_value": self.best_value,
            "num_worse": self.num_worse,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EvaluationHistory:
        """Raises InputError for a value that `to_json` did not make."""
        try:
            evaluations = [dict(item) for item in value["evaluations"]]
            return cls(
                evaluations=tuple(Evaluation(step=int(item.pop("step")), metrics=item) for item in evaluations),
                best_step=value["best_step"],
                best_value=value["best_value"],
                num_worse=int(value["num_worse"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the evaluations in the checkpoint cannot be read: {error!r}") from None

    def _is_better(self, value: float, min_delta: float, *, higher_is_better: bool) -> bool:
        if self.best_value is None:
            return True
        gain = value - self.best_value if higher_is_better else self.best_value - value
        return gain > min_delta
