"""`EvalConfig`: the keys of evaluation, a section of `bagpipe.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from bagpipe.config.optim_section import RateUnit
from bagpipe.config.ranges import Range, at_least

__all__ = ["EvalConfig", "Metric"]

Metric = Literal["auc", "gauc", "ne", "logloss"]


def _is_metric(name: str) -> bool:
    metric, at, label = name.partition("@")
    return metric in get_args(Metric) and bool(at) == bool(label)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of the held-out examples.

    Attributes:
        every: steps or epochs between evaluations during training; 0: one, at the end. Training is the same bit for
            bit, unless optim.schedule is plateau.
        unit: whether every counts steps or epochs (complete passes over the training examples).
        batches: score only the first so many batches during training; 0: all. The evaluation at the end scores all.
        metric: metric that tells the best evaluation: auc, gauc, ne or logloss; of data with several labels that of the
            first one, or of the one that is named, as in auc@buy.
        group: feature whose id is the group of an example, for gauc; empty: none.
        patience: stop training after so many evaluations in a row that are not better than the best; 0: never.
        min_delta: a better evaluation is better by more than this.
        keep_best: make a checkpoint at each evaluation that is the best so far, and keep that of the best
            (checkpoint.resume = best).
    """

    every: Annotated[int, at_least(0)] = 0
    unit: RateUnit = "step"
    batches: Annotated[int, at_least(0)] = 0
    metric: Annotated[
        str, Range("one of auc, gauc, ne, logloss, or one of them of a label, as auc@buy", _is_metric)
    ] = "auc"
    group: str = ""
    patience: Annotated[int, at_least(0)] = 0
    min_delta: Annotated[float, at_least(0)] = 0.0
    keep_best: bool = False
