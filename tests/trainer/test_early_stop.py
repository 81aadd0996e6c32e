"""The best evaluation and the end of patience, as a rule on numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.config.sections import EvalConfig
from bagpipe.errors import InputError
from trainer.early_stop import Evaluation, EvaluationHistory

#: (value, best step and evaluations since it afterwards), patience 3, better by more than 0.01, higher is better.
STORY = [
    (0.50, 10, 0),
    (0.505, 10, 1),  # not by more than 0.01
    (0.52, 30, 0),
    (None, 30, 1),  # no value is no better one
    (0.40, 30, 2),
    (0.525, 30, 3),
]


def _after(values: list[float | None], settings: EvalConfig, *, higher: bool = True) -> EvaluationHistory:
    history = EvaluationHistory()
    for number, value in enumerate(values, start=1):
        evaluation = Evaluation(step=10 * number, metrics={"auc": value, "ne": value})
        history = history.after(evaluation, settings, higher_is_better=higher)
    return history


def test_a_story() -> None:
    settings = EvalConfig(patience=3, min_delta=0.01)
    for number in range(len(STORY)):
        history = _after([value for value, _, _ in STORY[: number + 1]], settings)
        assert (history.best_step, history.num_worse) == STORY[number][1:]
        assert history.is_over(settings) is (number == len(STORY) - 1)
    assert history.last_step == 60
    assert not history.is_over(EvalConfig(patience=0))


@given(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=12), st.booleans())
def test_the_best_is_the_first_of_the_best_values(values: list[float | None], higher: bool) -> None:
    history = _after(values, EvalConfig(metric="ne"), higher=higher)
    known = [value for value in values if value is not None]
    if not known:
        assert history.best_step is history.best_value is None
        return
    best = (max if higher else min)(known)
    assert history.best_value == best
    assert history.best_step == 10 * (values.index(best) + 1)
    assert history.num_worse == len(values) - values.index(best) - 1


@given(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=5))
def test_checkpoints_keep_all_of_it(values: list[float | None]) -> None:
    history = _after(values, EvalConfig())
    assert EvaluationHistory.from_json(history.to_json()) == history


@pytest.mark.parametrize("record", [{}, {"evaluations": [{}]}, {"evaluations": 3}, {"evaluations": [[1]]}])
def test_a_record_of_another_kind_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(InputError, match="evaluations in the checkpoint cannot be read"):
        EvaluationHistory.from_json(record)


def test_no_value_before_the_first_is_not_the_best() -> None:
    assert _after([None, math.inf], EvalConfig()).best_step == 20
