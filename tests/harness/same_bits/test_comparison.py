"""What counts as a difference, and how it is named."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.harness.fuzz.twin import Outcome
from tests.harness.same_bits.comparison import MEASURED, difference
from trainer.result import Result

OLD = {"steps": 3, "loss": 0.5, "seconds": 1.0, "evaluations": [{"step": 2, "auc": 0.75}], "dense_digest": "ab" * 32}


def end(**changes: Any) -> Outcome:
    return Outcome(result={**OLD, **changes})


def test_equal_results_and_other_times() -> None:
    assert difference(end(), end(seconds=2.0)) == ""


def test_a_field_that_only_one_side_has_is_not_compared() -> None:
    assert difference(end(), end(more=1)) == ""


def test_differences_are_named() -> None:
    other = end(dense_digest="cd" * 32, evaluations=[{"step": 2, "auc": 0.5}])
    assert (
        difference(end(), other)
        == "dense_digest cdcdcdcdcdcdcdcdcdcdcdcd for abababababababababababab; evaluations.0.auc 0.5 for 0.75"
    )
    assert (
        difference(end(), end(evaluations=[])) == "evaluations.0.step nothing for 2; evaluations.0.auc nothing for 0.75"
    )


def test_many_differences_are_counted() -> None:
    found = difference(end(), end(evaluations=[{"step": step, "auc": 0.5} for step in range(4)]))
    assert found.startswith(
        "evaluations.0.step 0 for 2; evaluations.0.auc 0.5 for 0.75; evaluations.1.step 1 for nothing;"
    )
    assert found.endswith("; 4 more")
    assert found.count(";") == 4


def test_ends_without_a_result() -> None:
    refused = Outcome(code=2, lines=("error: no",))
    assert difference(end(), refused) == "BASE ended with 3 steps, HEAD with code 2: error: no"
    assert difference(refused, refused) == "expected results, both ended with code 2: error: no"
    broken = Outcome(code=1, problem="start 0: a traceback")
    assert difference(broken, end(), ("old", "new")) == "old: start 0: a traceback"


def test_all_fields_but_measured_ones_are_compared() -> None:
    assert {field.name for field in dataclasses.fields(Result)} >= MEASURED
