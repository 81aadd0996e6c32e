"""Metrics of held-out predictions, by name, of their logits and labels.

    every rank: add(logits, labels) per batch ──gathered──> rank 0: Scores of all examples ──METRICS──> Quality

Names and formulas are those of torchrec.metrics. A new metric is an entry of `METRICS` and a field of `Quality`.
Rule of this file: *a metric never ends a finished job*. One without a value is left out, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import InputError
from trainer.groups import GroupColumn
from trainer.ranking import Areas, areas_by_group

__all__ = ["METRICS", "BinaryMetrics", "Metric", "Quality", "Scores", "UndefinedMetric", "left_out", "metric_of"]


class UndefinedMetric(ValueError):
    """A metric is not defined for these examples; the message says why."""


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: `areas` is computed once
class Scores:
    """Scored examples; at least one, with finite logits.

    Attributes:
        logits, labels: float64 ``[n]``.
        groups: int64 ``[n]``, the group of each example; None: they have none.
        num_groups: int32 ``[n]``, groups that each example names; one without any has no group. None: one each.
    """

    logits: NDArray[np.float64]
    labels: NDArray[np.float64]
    groups: NDArray[np.int64] | None = None
    num_groups: NDArray[np.int32] | None = None

    @cached_property
    def areas(self) -> Areas:
        """The areas of the groups. Examples without a group are left out.

        Raises:
            UndefinedMetric: soft labels, an example with several groups, or none with one.
        """
        _check_hard(self)
        if self.num_groups is None:
            return areas_by_group(self.logits, self.labels == 1, self.groups)
        assert self.groups is not None, "num_groups come with groups"
        num_several, chosen = int((self.num_groups > 1).sum()), self.num_groups == 1
        if num_several or not chosen.any():
            what = "several" if num_several else "none"
            count = num_several or len(self.labels)
            raise UndefinedMetric(f"it needs one group per example, and {count} of {len(self.labels)} have {what}")
        return areas_by_group(self.logits[chosen], self.labels[chosen] == 1, self.groups[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: as in torchrec.metrics; the field of `Quality` and of the result.
        title: its name for people.
        compute: its value; raises `UndefinedMetric`.
        higher_is_better: the direction of better models; None: neither (the best value is in between).
        needs_groups: it is computed of examples with groups only.
    """

    name: str
    title: str
    compute: Callable[[Scores], float]
    higher_is_better: bool | None
    needs_groups: bool = False


def area(scores: Scores) -> float:
    """Area under the ROC curve, ties counting half. Of logits: a sigmoid keeps their order but rounds confident ones to
    the same score.

    Raises:
        UndefinedMetric: only one class, or a label that is no class (soft labels).
    """
    _check_hard(scores)
    _check_both_classes(scores)
    return float(areas_by_group(scores.logits, scores.labels == 1).areas()[0])


def grouped_area(scores: Scores) -> float:
    """Mean of the groups' areas, weighted by their numbers of examples (Zhou et al. 2018, "Deep Interest Network"). A
    group with one class is left out. (torchrec's ``gauc`` gives all groups the same weight.)

    Raises:
        UndefinedMetric: no group has both classes, or soft labels.
    """
    areas = scores.areas
    if not areas.has_both.any():
        raise UndefinedMetric(f"it needs a group with both classes, and none of {len(areas.groups)} groups has them")
    return float(np.average(areas.areas(), weights=areas.examples[areas.has_both]))


def log_loss(scores: Scores) -> float:
    """Mean binary cross entropy, in nats. Defined for soft labels and one class too."""
    return float(np.mean(np.logaddexp(0, scores.logits) - scores.logits * scores.labels))


def normalised_entropy(scores: Scores) -> float:
    """Log loss divided by the entropy of the mean label (He et al. 2014, "Practical Lessons from Predicting Clicks on
    Ads at Facebook"). Defined for soft labels too.

    Raises:
        UndefinedMetric: only one class.
    """
    _check_both_classes(scores)
    rate = float(scores.labels.mean())
    return log_loss(scores) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def calibration(scores: Scores) -> float:
    """Mean predicted probability divided by the mean label; 1 is best. Defined for soft labels too.

    Raises:
        UndefinedMetric: all labels are 0.
    """
    if not scores.labels.any():
        raise UndefinedMetric(f"it needs a mean label above 0, and all {len(scores.labels)} held-out labels are 0")
    return float(torch.from_numpy(scores.logits).sigmoid().mean()) / float(scores.labels.mean())


#: By name, in the order of reports.
METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(name="auc", title="AUC", compute=area, higher_is_better=True),
        Metric(name="ne", title="NE", compute=normalised_entropy, higher_is_better=False),
        Metric(name="logloss", title="log loss", compute=log_loss, higher_is_better=False),
        Metric(name="calibration", title="calibration", compute=calibration, higher_is_better=None),
        Metric(name="gauc", title="GAUC", compute=grouped_area, higher_is_better=True, needs_groups=True),
    )
}


def metric_of(name: str) -> Metric:
    """The metric with a name. Raises InputError: there is none."""
    if name not in METRICS:
        raise InputError(f"metric {name!r} is unknown, the metrics are {', '.join(METRICS)}")
    return METRICS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Metrics of some examples; None where a metric was not computed.

    Attributes:
        auc: area under the ROC curve.
        ne: normalised entropy.
        logloss: mean binary cross entropy, in nats.
        calibration: mean predicted probability / mean label.
        gauc: mean of the groups' areas, weighted by their examples; None without groups.
        gauc_groups, gauc_groups_left_out: groups with both classes, and those with one, which `gauc` leaves out; None
            without `gauc`.
        left_out: why a metric has no value, by its name; empty if none was asked for.
    """

    auc: float | None = None
    ne: float | None = None
    logloss: float | None = None
    calibration: float | None = None
    gauc: float | None = None
    gauc_groups: int | None = None
    gauc_groups_left_out: int | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """The metrics that have a value, by name."""
        found = {name: getattr(self, name) for name in METRICS}
        return {name: value for name, value in found.items() if value is not None}


def left_out(reason: str, *, has_groups: bool = False) -> Quality:
    """All metrics left out for the same reason."""
    return Quality(left_out={name: reason for name, metric in METRICS.items() if has_groups >= metric.needs_groups})


class BinaryMetrics:
    """Collects logits and labels on the host, 8 B per example in float32 and 16 B in float64; on rank 0 all ranks' in
    float64, 16 B per example. All metrics are exact: they need the scores of all examples.

    Args:
        groups: notes the groups of the same examples, 12 B more each; None: they have none.
    """

    def __init__(self, groups: GroupColumn | None = None) -> None:
        self._columns = None if groups is None else groups.columns
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits and labels ``[n]`` of one batch."""
        # Tensors from a device are in staging memory, which later batches reuse.
        self._logits.append(logits.detach().to("cpu", copy=True))
        self._labels.append(labels.detach().to("cpu", copy=True))

    def gathered(self, collect: Callable[[Tensor], Tensor]) -> BinaryMetrics:
        """Metrics over the examples of all ranks. `collect` concatenates the ranks' 1-D tensors (`Ranks.collect`)."""
        together = BinaryMetrics()
        together.add(collect(_joined(self._logits)), collect(_joined(self._labels)))
        if self._columns is not None:
            ids, lengths = self._columns()
            columns = collect(ids), collect(lengths)
            together._columns = lambda: columns
        return together

    def quality(self) -> Quality:
        """All metrics. Raises nothing: a metric that cannot be computed is left out with the reason."""
        try:
            scores = self._scores()
        except UndefinedMetric as error:
            return left_out(str(error), has_groups=self._columns is not None)
        values: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for name, metric in METRICS.items():
            if metric.needs_groups and scores.groups is None:
                continue
            try:
                values[name] = metric.compute(scores)
            except UndefinedMetric as error:
                reasons[name] = str(error)
            except Exception as error:  # such as no memory
                reasons[name] = f"it failed with {type(error).__name__}: {' '.join(str(error).split())}"
        if "gauc" in values:
            has_both = scores.areas.has_both
            values["gauc_groups"], values["gauc_groups_left_out"] = int(has_both.sum()), int((~has_both).sum())
        return Quality(**values, left_out=reasons)

    def _scores(self) -> Scores:
        """All examples.

        Raises:
            UndefinedMetric: there are none, or a logit is not finite.
        """
        logits, labels = _joined(self._logits).numpy(), _joined(self._labels).numpy()
        if not len(labels):
            raise UndefinedMetric("there are no held-out examples")
        num_bad = int((~np.isfinite(logits)).sum())
        if num_bad:
            raise UndefinedMetric(f"{num_bad} of {len(logits)} held-out scores are not finite")
        if self._columns is None:
            return Scores(logits=logits, labels=labels)
        ids, lengths = self._columns()
        return Scores(logits=logits, labels=labels, groups=ids.numpy(), num_groups=lengths.numpy())


def _joined(parts: list[Tensor]) -> Tensor:
    """All parts ``[n]`` as one tensor, float64."""
    return torch.cat([torch.empty(0), *parts]).double()


def _check_hard(scores: Scores) -> None:
    """Raises UndefinedMetric if a label is neither 0 nor 1."""
    num_soft = int(((scores.labels != 0) & (scores.labels != 1)).sum())
    if num_soft:
        raise UndefinedMetric(
            f"it needs labels 0 and 1, and {num_soft} of {len(scores.labels)} held-out labels are neither"
        )


def _check_both_classes(scores: Scores) -> None:
    """Raises UndefinedMetric if all labels are 0, or all are 1."""
    labels = scores.labels
    if labels.min() == labels.max() and labels[0] in (0.0, 1.0):
        raise UndefinedMetric(f"it needs two classes, and all {len(labels)} held-out labels are {labels[0]:g}")
