from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.gauc import compute_gauc_3d, compute_window_auc
from torchrec.metrics.ne import compute_logloss, compute_ne, get_ne_states

from bagpipe.errors import InputError
from tests.trainer.batches import batch_of
from trainer.groups import GroupColumn
from trainer.metrics import (
    METRICS,
    BinaryMetrics,
    Quality,
    Scores,
    UndefinedMetric,
    by_label,
    left_out,
    metric_key,
    metric_of,
)
from trainer.tasks import Tasks

ONE = Tasks()

#: Metrics of examples without groups.
UNGROUPED = [name for name, metric in METRICS.items() if not metric.needs_groups]


def metrics_of(logits: list[float], labels: list[float]) -> BinaryMetrics:
    metrics = BinaryMetrics()
    metrics.add(torch.tensor(logits), torch.tensor(labels))
    return metrics


def cases(kind: str) -> Iterator[Scores]:
    """80 random cases: with ties or without, hard or soft labels, one class, and groups of which some are empty."""
    rng = np.random.default_rng([*kind.encode()])
    for _ in range(80):
        size = int(rng.integers(1, 80))
        logits = rng.normal(size=size) * float(rng.choice([0.1, 1, 5]))
        if kind == "ties":
            logits = np.round(logits)
        labels = rng.random(size) if kind == "soft" else (rng.random(size) < rng.random()).astype(np.float64)
        if kind == "one class":
            labels[:] = rng.integers(2)
        yield Scores(logits=logits, labels=labels, groups=rng.integers(0, int(rng.integers(1, 12)), size) * 3)


def value(name: str, scores: Scores) -> float | None:
    try:
        return metric_of(name).compute(scores)
    except UndefinedMetric:
        return None


def mean_area(scores: Scores) -> float | None:
    """GAUC by scikit-learn and a loop over groups."""
    assert scores.groups is not None
    areas, sizes = [], []
    for group in set(scores.groups.tolist()):
        chosen = scores.groups == group
        if len(set(scores.labels[chosen].tolist())) == 2:
            areas.append(roc_auc_score(scores.labels[chosen], scores.logits[chosen]))
            sizes.append(chosen.sum())
    return float(np.average(areas, weights=sizes)) if areas else None


@pytest.mark.parametrize("kind", ["distinct", "ties", "soft", "one class"])
def test_metrics_are_those_of_scikit_learn(kind: str) -> None:
    for scores in cases(kind):
        labels, predictions = scores.labels, 1 / (1 + np.exp(-scores.logits))
        is_hard, has_both = kind != "soft", 0 < labels.mean() < 1
        area = float(roc_auc_score(labels, scores.logits)) if is_hard and has_both else None
        assert value("auc", scores) == (None if area is None else pytest.approx(area, abs=1e-9))
        group_area = mean_area(scores) if is_hard else None
        assert value("gauc", scores) == (None if group_area is None else pytest.approx(group_area, abs=1e-9))
        # Both classes as weighted examples: scikit-learn's loss takes no soft labels.
        loss = log_loss(
            np.repeat([0, 1], len(labels)), np.tile(predictions, 2), sample_weight=np.append(1 - labels, labels)
        )
        assert value("logloss", scores) == pytest.approx(loss, abs=1e-9)
        rate = labels.mean()
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if has_both else 0
        assert value("ne", scores) == (pytest.approx(loss / entropy, rel=1e-9) if has_both else None)
        expected = pytest.approx(predictions.mean() / rate, rel=1e-9) if rate else None
        assert value("calibration", scores) == expected


@pytest.mark.parametrize("kind", ["distinct", "ties", "soft"])
def test_weighted_metrics_are_those_of_scikit_learn_and_torchrec(kind: str) -> None:
    """Of examples with a weight above 0; the others are none."""
    eta = 1e-12
    rng = np.random.default_rng(1)
    for plain in cases(kind):
        raw = rng.exponential(size=len(plain.labels)) * (rng.random(len(plain.labels)) < 0.9)
        metrics = BinaryMetrics(GroupColumn(0), tasks=Tasks(is_weighted=True))
        metrics._columns = lambda plain=plain: (  # type: ignore[misc]
            torch.from_numpy(plain.groups),
            torch.ones(len(plain.labels), dtype=torch.int32),
        )
        metrics.add(torch.from_numpy(plain.logits), torch.from_numpy(np.column_stack([plain.labels, raw])))
        found = metrics.quality()
        if not raw.any():
            assert found.left_out["auc"] == f"the weights of all {len(raw)} held-out examples are 0"
            continue
        counts = raw > 0
        logits, labels, weights, groups = (part[counts] for part in (plain.logits, plain.labels, raw, plain.groups))  # type: ignore[index]
        has_both = 0 < labels.mean() < 1
        if kind != "soft" and has_both:
            area = roc_auc_score(labels, logits, sample_weight=weights)
            assert found.auc == pytest.approx(area, abs=1e-9)
            areas = {
                group: roc_auc_score(labels[of], logits[of], sample_weight=weights[of])
                for group in set(groups.tolist())
                if 0 < labels[of := groups == group].mean() < 1
            }
            sums = [weights[groups == group].sum() for group in areas]
            expected = float(np.average([*areas.values()], weights=sums)) if areas else None
            assert found.gauc == (None if expected is None else pytest.approx(expected, abs=1e-9))
        tensors = [torch.from_numpy(part)[None] for part in (labels, 1 / (1 + np.exp(-logits)), weights)]
        if kind == "distinct" and has_both:
            theirs = compute_auc(1, [tensors[1]], [tensors[0]], [tensors[2]])
            assert found.auc == pytest.approx(float(theirs), abs=1e-9)
        states = get_ne_states(*tensors, eta)
        loss_sum, positives, negatives = (states[name] for name in ("cross_entropy_sum", "pos_labels", "neg_labels"))
        loss = float(compute_logloss(loss_sum, positives, negatives.clone(), eta)) * math.log(2)
        assert found.logloss == pytest.approx(loss, rel=1e-9, abs=1e-9)
        if has_both:
            ne = float(compute_ne(loss_sum, torch.tensor([weights.sum()]), positives, negatives, eta))
            assert found.ne == pytest.approx(ne, rel=1e-9)
        if labels.any():
            ratio = compute_calibration(*get_calibration_states(*tensors).values())
            assert found.calibration == pytest.approx(float(ratio), rel=1e-9)


def test_each_label_has_its_metrics() -> None:
    first, second = (next(cases(kind)) for kind in ("distinct", "ties"))
    size = min(len(first.labels), len(second.labels))
    columns = [
        np.stack([a[:size], b[:size]], axis=1)
        for a, b in ((first.logits, second.logits), (first.labels, second.labels))
    ]
    tasks = Tasks(labels=("click", "buy"))
    metrics = BinaryMetrics(tasks=tasks)
    for part in np.array_split(np.arange(size), 3):
        metrics.add(*(torch.from_numpy(column[part]) for column in columns))
    quality = metrics.gathered(lambda flat: flat).quality()
    for number, label in enumerate(tasks.labels):
        alone = BinaryMetrics()
        alone.add(*(torch.from_numpy(column[:, number]) for column in columns))
        assert quality.tasks[label] == alone.quality().of_label()
    assert quality.of_label() == quality.tasks["click"]
    assert quality.named()["auc@buy"] == quality.tasks["buy"]["auc"]
    assert by_label(quality.values())["buy"] == {name: quality.tasks["buy"][name] for name in UNGROUPED}
    assert metric_of("auc@buy").name == "auc"
    assert [metric_key("auc@buy", tasks), metric_key("ne", tasks), metric_key("ne@label", ONE)] == [
        "auc@buy",
        "ne",
        "ne",
    ]
    with pytest.raises(
        InputError, match=r"^eval\.metric auc@like: the data has no label 'like', its labels are click, buy$"
    ):
        metric_key("auc@like", tasks)


@pytest.mark.parametrize("kind", ["distinct", "soft", "one class"])
def test_metrics_are_those_of_torchrec(kind: str) -> None:
    """Without ties, whose order torchrec leaves open; where torchrec has a value by convention, ours has none."""
    eta = 1e-12
    for scores in cases(kind):
        labels = torch.from_numpy(scores.labels).reshape(1, -1)
        predictions, weights = torch.from_numpy(scores.logits).sigmoid().reshape(1, -1), torch.ones_like(labels)
        num, both = labels.shape[1], 0 < scores.labels.mean() < 1
        area = value("auc", scores)
        if kind != "soft" and both:
            assert area == pytest.approx(float(compute_auc(1, [predictions], [labels], [weights])), abs=1e-9)
        states = get_ne_states(labels, predictions, weights, eta)
        loss_sum, positives, negatives = (states[name] for name in ("cross_entropy_sum", "pos_labels", "neg_labels"))
        # torchrec's losses are in bits.
        loss = float(compute_logloss(loss_sum, positives, negatives.clone(), eta)) * math.log(2)
        assert value("logloss", scores) == pytest.approx(loss, rel=1e-9, abs=1e-9)
        if both:
            ne = float(compute_ne(loss_sum, torch.tensor([num]), positives, negatives, eta))
            assert value("ne", scores) == pytest.approx(ne, rel=1e-9)
        if scores.labels.any():
            ratio = compute_calibration(*get_calibration_states(labels, predictions, weights).values())
            assert value("calibration", scores) == pytest.approx(float(ratio), rel=1e-9)


def test_the_area_by_groups_of_one_size_is_that_of_torchrec() -> None:
    rng = np.random.default_rng(0)
    for _ in range(80):
        num_groups, size = int(rng.integers(1, 9)), int(rng.integers(2, 12))
        logits, labels = rng.normal(size=(num_groups, size)), rng.integers(0, 2, (num_groups, size)).astype(np.float64)
        scores = Scores(
            logits=logits.reshape(-1), labels=labels.reshape(-1), groups=np.repeat(np.arange(num_groups), size)
        )
        tensors = (torch.from_numpy(array)[None] for array in (logits, labels, np.ones_like(labels)))
        found = compute_gauc_3d(*tensors)
        if not found["num_samples"].any():
            assert value("gauc", scores) is None
            continue
        expected = float(compute_window_auc(found["auc_sum"], found["num_samples"])["gauc"])
        assert value("gauc", scores) == pytest.approx(expected, abs=2e-9)


def test_examples_come_batch_by_batch() -> None:
    scores = next(cases("distinct"))
    metrics = BinaryMetrics()
    for part in np.array_split(np.arange(len(scores.labels)), 7):
        metrics.add(torch.from_numpy(scores.logits[part]), torch.from_numpy(scores.labels[part]))
    quality = metrics.quality()
    assert quality.values() == {name: value(name, scores) for name in UNGROUPED}
    assert quality.left_out == {}


def test_every_metric_is_a_field_and_says_which_direction_is_better() -> None:
    extra = {"left_out", "tasks", "gauc_groups", "gauc_groups_left_out"}
    assert {field.name for field in dataclasses.fields(Quality)} == {*METRICS, *extra}
    assert {name: metric.higher_is_better for name, metric in METRICS.items()} == {
        "auc": True, "ne": False, "logloss": False, "calibration": None, "gauc": True,
    }  # fmt: skip
    assert all(metric_of(name).name == name for name in METRICS)
    with pytest.raises(InputError, match="metric 'f1' is unknown, the metrics are auc, ne, logloss, calibration, gauc"):
        metric_of("f1")


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_metrics_that_need_two_classes_are_left_out(label: float) -> None:
    reason = f"it needs two classes, and all 2 held-out labels are {label:g}"
    quality = metrics_of([0.5, -0.5], [label, label]).quality()
    expected = {"auc": reason, "ne": reason}
    if not label:
        expected["calibration"] = "it needs a mean label above 0, and all 2 held-out labels are 0"
    assert quality.left_out == expected
    assert set(quality.values()) == set(UNGROUPED) - set(expected)


def test_metrics_of_no_examples_are_left_out() -> None:
    for metrics in (BinaryMetrics(), metrics_of([], [])):
        assert metrics.quality() == left_out("there are no held-out examples")
    assert set(left_out("why").left_out) == set(UNGROUPED)
    assert set(left_out("why", has_groups=True).left_out) == set(METRICS)


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_metrics_of_scores_that_are_not_finite_are_left_out(logit: float) -> None:
    quality = metrics_of([0.0, 1.0, logit], [0.0, 1.0, 1.0]).quality()
    assert quality == left_out("1 of 3 held-out scores are not finite")


def test_soft_labels_have_an_entropy_but_no_area() -> None:
    quality = metrics_of([0.3, -1.0, 2.0, 0.0], [0.25, 0.0, 1.0, 0.5]).quality()
    assert quality.left_out == {"auc": "it needs labels 0 and 1, and 2 of 4 held-out labels are neither"}
    assert set(quality.values()) == set(UNGROUPED) - {"auc"}


def test_equal_soft_labels_have_an_entropy() -> None:
    """The log loss of the best constant score is the entropy of the mean label."""
    quality = metrics_of([0.0] * 3, [0.5] * 3).quality()
    assert (quality.ne, quality.calibration) == (pytest.approx(1.0, rel=1e-12), 1.0)
    assert set(quality.left_out) == {"auc"}


def test_groups_without_both_classes_have_no_area() -> None:
    scores = Scores(logits=np.arange(3.0), labels=np.array([0.0, 1.0, 1.0]), groups=np.array([0, 1, 1]))
    with pytest.raises(UndefinedMetric, match="it needs a group with both classes, and none of 2 groups has them"):
        metric_of("gauc").compute(scores)


def grouped(logits: list[float], labels: list[float], bags: list[list[int]]) -> BinaryMetrics:
    groups = GroupColumn(0)
    groups.add(batch_of([bags]))
    metrics = BinaryMetrics(groups)
    metrics.add(torch.tensor(logits), torch.tensor(labels))
    return metrics


def test_groups_of_one_class_and_examples_without_a_group_are_left_out() -> None:
    bags = [[7], [7], [-3], [-3], [], [7]]
    metrics = grouped([0.0, 1.0, 2.0, 3.0, 9.0, 0.5], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0], bags)
    quality = metrics.quality()
    assert (quality.gauc, quality.gauc_groups, quality.gauc_groups_left_out) == (1.0, 1, 1)
    together = metrics.gathered(lambda values: torch.cat([values, values])).quality()
    assert (together.gauc, together.gauc_groups, together.gauc_groups_left_out) == (1.0, 1, 1)


def test_examples_without_a_label_have_no_metric() -> None:
    quality = grouped([0.0, 1.0], [0.0, float("nan")], [[1], [1]]).quality()
    assert quality.values() == {}
    assert set(quality.left_out.values()) == {"1 of 2 examples have no label"}


@pytest.mark.parametrize(("bags", "count", "what"), [([[1], [2, 3]], 1, "several"), ([[], []], 2, "none")])
def test_examples_with_several_groups_or_none_have_no_area(bags: list[list[int]], count: int, what: str) -> None:
    quality = grouped([0.0, 1.0], [0.0, 1.0], bags).quality()
    assert (quality.gauc, quality.auc) == (None, 1.0)
    assert quality.left_out == {"gauc": f"it needs one group per example, and {count} of 2 have {what}"}


def test_a_metric_that_fails_is_left_out_and_the_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scores: Scores) -> float:
        raise RuntimeError("two\nlines")

    broken = dataclasses.replace(METRICS["auc"], compute=fail)
    monkeypatch.setattr("trainer.metrics.METRICS", {**METRICS, "auc": broken})
    quality = metrics_of([0.0, 1.0], [0.0, 1.0]).quality()
    assert quality.left_out == {"auc": "it failed with RuntimeError: two lines"}
    assert set(quality.values()) == set(UNGROUPED) - {"auc"}


def test_confident_scores_keep_their_order() -> None:
    """A float32 sigmoid would round all of these scores to one."""
    quality = metrics_of([30.0, 40.0, 50.0, 60.0], [0.0, 0.0, 1.0, 1.0]).quality()
    assert quality.auc == 1.0
    assert quality.logloss == pytest.approx(17.5)


def test_scores_are_copied() -> None:
    """The scores' memory is reused."""
    metrics, logits, labels = BinaryMetrics(), torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0])
    metrics.add(logits, labels)
    logits.zero_()
    labels.zero_()
    assert metrics.quality().auc == 1.0
