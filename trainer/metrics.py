"""Metrics of held-out predictions, by name, of their logits and labels.

    every rank: add(logits, labels) per batch ──gathered──> rank 0: Scores of all examples ──METRICS──> Quality

Names and formulas are those of torchrec.metrics, those of weighted examples too: every sum over examples is one of
weights, and an example of weight 0 is none. With several labels each has metrics of its own, called ``auc@buy``. A new
metric is an entry of `METRICS` and a field of `Quality`.
Rule of this file: *a metric never ends a finished job*. One without a value is left out, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import InputError
from trainer.groups import GroupColumn
from trainer.ranking import Areas, areas_by_group
from trainer.tasks import Tasks

__all__ = [
    "METRICS",
    "BinaryMetrics",
    "Metric",
    "Quality",
    "Scores",
    "UndefinedMetric",
    "by_label",
    "left_out",
    "left_out_lines",
    "metric_key",
    "metric_of",
]

#: Of examples without weights.
ONE_LABEL = Tasks()


class UndefinedMetric(ValueError):
    """A metric is not defined for these examples; the message says why."""


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: `areas` is computed once
class Scores:
    """Scored examples; at least one, with finite logits.

    Attributes:
        logits, labels: float64 ``[n]``.
        groups: int64 ``[n]``, the group of each example; None: they have none.
        num_groups: int32 ``[n]``, groups that each example names; one without any has no group. None: one each.
        weights: float64 ``[n]``, of the examples, above 0; None: all weigh the same.
    """

    logits: NDArray[np.float64]
    labels: NDArray[np.float64]
    groups: NDArray[np.int64] | None = None
    num_groups: NDArray[np.int32] | None = None
    weights: NDArray[np.float64] | None = None

    def mean(self, values: NDArray[np.float64]) -> float:
        """Mean of ``[n]`` values by the weights."""
        return float(values.mean() if self.weights is None else np.average(values, weights=self.weights))

    @cached_property
    def areas(self) -> Areas:
        """The areas of the groups. Examples without a group are left out.

        Raises:
            UndefinedMetric: soft labels, an example with several groups, or none with one.
        """
        _check_hard(self)
        if self.num_groups is None:
            return areas_by_group(self.logits, self.labels == 1, self.groups, self.weights)
        assert self.groups is not None, "num_groups come with groups"
        num_several, chosen = int((self.num_groups > 1).sum()), self.num_groups == 1
        if num_several or not chosen.any():
            what = "several" if num_several else "none"
            count = num_several or len(self.labels)
            raise UndefinedMetric(f"it needs one group per example, and {count} of {len(self.labels)} have {what}")
        weights = None if self.weights is None else self.weights[chosen]
        return areas_by_group(self.logits[chosen], self.labels[chosen] == 1, self.groups[chosen], weights)


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
    return float(areas_by_group(scores.logits, scores.labels == 1, weights=scores.weights).areas()[0])


def grouped_area(scores: Scores) -> float:
    """Mean of the groups' areas, weighted by their numbers of examples, or by the sums of their weights (Zhou et al.
    2018, "Deep Interest Network"). A group with one class is left out. (torchrec's ``gauc`` gives all groups the same
    weight.)

    Raises:
        UndefinedMetric: no group has both classes, or soft labels.
    """
    areas = scores.areas
    if not areas.has_both.any():
        raise UndefinedMetric(f"it needs a group with both classes, and none of {len(areas.groups)} groups has them")
    return float(np.average(areas.areas(), weights=areas.examples[areas.has_both]))


def log_loss(scores: Scores) -> float:
    """Mean binary cross entropy, in nats. Defined for soft labels and one class too."""
    return scores.mean(np.logaddexp(0, scores.logits) - scores.logits * scores.labels)


def normalised_entropy(scores: Scores) -> float:
    """Log loss divided by the entropy of the mean label (He et al. 2014, "Practical Lessons from Predicting Clicks on
    Ads at Facebook"). Defined for soft labels too.

    Raises:
        UndefinedMetric: only one class.
    """
    _check_both_classes(scores)
    rate = scores.mean(scores.labels)
    return log_loss(scores) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def calibration(scores: Scores) -> float:
    """Mean predicted probability divided by the mean label; 1 is best. Defined for soft labels too.

    Raises:
        UndefinedMetric: all labels are 0.
    """
    if not scores.labels.any():
        raise UndefinedMetric(f"it needs a mean label above 0, and all {len(scores.labels)} held-out labels are 0")
    return scores.mean(torch.from_numpy(scores.logits).sigmoid().numpy()) / scores.mean(scores.labels)


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
    """The metric with a name, or of a name such as ``auc@buy``. Raises InputError: there is none."""
    found = METRICS.get(name.partition("@")[0])
    if found is None:
        raise InputError(f"metric {name!r} is unknown, the metrics are {', '.join(METRICS)}")
    return found


def metric_key(name: str, tasks: Tasks) -> str:
    """The key of `eval.metric` among `Quality.named`: with one label the metric's name, whose label may be named too.

    Raises:
        InputError: the label that it names is none of the data.
    """
    metric, _, label = name.partition("@")
    if label and label not in tasks.labels:
        raise InputError(
            f"eval.metric {name}: the data has no label {label!r}, its labels are {', '.join(tasks.labels)}"
        )
    return name if len(tasks.labels) > 1 else metric


def by_label(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`Quality.values` by label; of data with one label, whose names have none, by ``""``."""
    labels = dict.fromkeys(name.partition("@")[2] for name in values if name.partition("@")[0] in METRICS)
    found = [label for label in labels if label] or [""]
    return {
        label: {name: values[key] for name in METRICS if (key := f"{name}@{label}" if label else name) in values}
        for label in found
    }


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
        tasks: with several labels, the same of each one, by its name, with `left_out` as `metrics_left_out`; the fields
            above are then of the first label.
    """

    auc: float | None = None
    ne: float | None = None
    logloss: float | None = None
    calibration: float | None = None
    gauc: float | None = None
    gauc_groups: int | None = None
    gauc_groups_left_out: int | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def named(self) -> dict[str, float | None]:
        """The metrics by name, those of each of several labels by names such as ``auc@buy``."""
        of_labels = {f"{name}@{label}": found[name] for label, found in self.tasks.items() for name in METRICS}
        return {**{name: getattr(self, name) for name in METRICS}, **of_labels}

    def values(self) -> dict[str, float]:
        """Those of `named` that have a value."""
        return {name: value for name, value in self.named().items() if value is not None}

    def reasons(self) -> dict[str, str]:
        """The reasons of metrics without a value, by the names of `named`."""
        of_labels = {
            f"{name}@{label}": why
            for label, found in self.tasks.items()
            for name, why in found["metrics_left_out"].items()
        }
        return {**self.left_out, **of_labels}

    def of_label(self) -> dict[str, Any]:
        """The fields of one label as an item of `tasks`."""
        values = {name: getattr(self, name) for name in (*METRICS, "gauc_groups", "gauc_groups_left_out")}
        return {**values, "metrics_left_out": dict(self.left_out)}


def left_out(reason: str, *, has_groups: bool = False) -> Quality:
    """All metrics left out for the same reason."""
    return Quality(left_out={name: reason for name, metric in METRICS.items() if has_groups >= metric.needs_groups})


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """One line per reason why metrics have no value, of `Quality.left_out`."""
    lines = []
    for reason in dict.fromkeys(left_out.values()):
        titles = [METRICS[name].title for name, why in left_out.items() if why == reason]
        words = ", ".join(titles[:-1]) + " and " + titles[-1] if len(titles) > 1 else titles[0]
        lines.append(f"{words} {'are' if len(titles) > 1 else 'is'} left out: {reason}")
    return lines


class BinaryMetrics:
    """Collects logits and labels on the host, 8 B per example and label in float32 and 16 B in float64; on rank 0 all
    ranks' in float64, 16 B. All metrics are exact: they need the scores of all examples.

    Args:
        groups: notes the groups of the same examples, 12 B more each; None: they have none.
        tasks: labels and weights of the examples.
    """

    def __init__(self, groups: GroupColumn | None = None, *, tasks: Tasks = ONE_LABEL) -> None:
        self._tasks = tasks
        self._columns = None if groups is None else groups.columns
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits and targets of one batch; see `Tasks.split`."""
        # Tensors from a device are in staging memory, which later batches reuse.
        self._logits.append(logits.detach().to("cpu", copy=True))
        self._labels.append(labels.detach().to("cpu", copy=True))

    def gathered(self, collect: Callable[[Tensor], Tensor]) -> BinaryMetrics:
        """Metrics over the examples of all ranks. `collect` concatenates the ranks' 1-D tensors (`Ranks.collect`)."""
        together = BinaryMetrics(tasks=self._tasks)
        together.add(*(collect(_joined(parts).reshape(-1)) for parts in (self._logits, self._labels)))
        if self._columns is not None:
            ids, lengths = self._columns()
            columns = collect(ids), collect(lengths)
            together._columns = lambda: columns
        return together

    def quality(self) -> Quality:
        """All metrics. Raises nothing: a metric that cannot be computed is left out with the reason."""
        found = [self._of_label(number) for number in range(len(self._tasks.labels))]
        if len(found) == 1:
            return found[0]
        of_labels = {label: item.of_label() for label, item in zip(self._tasks.labels, found, strict=True)}
        return replace(found[0], tasks=of_labels)

    def _of_label(self, number: int) -> Quality:
        """The metrics of one label."""
        try:
            scores = self._scores(number)
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

    def _scores(self, number: int) -> Scores:
        """All examples that have a weight, by one label.

        Raises:
            UndefinedMetric: there are none, or a logit is not finite.
        """
        columns = self._tasks.split(_joined(self._logits), _joined(self._labels))
        logits, labels = columns[0][:, number].numpy(), columns[1][:, number].numpy()
        if not len(labels):
            raise UndefinedMetric("there are no held-out examples")
        num_missing = int(np.isnan(labels).sum())
        if num_missing:
            raise UndefinedMetric(f"{num_missing} of {len(labels)} examples have no label")
        num_bad = int((~np.isfinite(logits)).sum())
        if num_bad:
            raise UndefinedMetric(f"{num_bad} of {len(logits)} held-out scores are not finite")
        groups = (None, None) if self._columns is None else tuple(part.numpy() for part in self._columns())
        if columns[2] is None:
            return Scores(logits=logits, labels=labels, groups=groups[0], num_groups=groups[1])
        weights = columns[2].numpy()
        counts = weights > 0
        if not counts.any():
            raise UndefinedMetric(f"the weights of all {len(weights)} held-out examples are 0")
        ids, lengths = (None if part is None else part[counts] for part in groups)
        return Scores(
            logits=logits[counts], labels=labels[counts], groups=ids, num_groups=lengths, weights=weights[counts]
        )


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
