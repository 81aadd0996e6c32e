from __future__ import annotations

import json

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.formats.placement_text import (
    PlacementFigures,
    layers_of_text,
    placement_summary,
    placement_text,
)
from bagpipe.schedule.lowering.precondition import Preconditioning, place_preconditioning
from tests.schedule.second_order import plain


def test_layers_are_one_number_or_one_per_stage() -> None:
    assert layers_of_text("2", 3) == {0: 2, 1: 2, 2: 2}
    assert layers_of_text("2,0,1", 3) == {0: 2, 1: 0, 2: 1}
    for text, message in (
        ("2,1", "expected 1 number of layers or 3, one per stage, got 2,1"),
        ("", "such as 2 or 2,1,1,3"),
        ("-1", "got '-1'"),
        ("1e9", "got '1e9'"),
        ("99999", "each below 10000"),
    ):
        with pytest.raises(ScheduleError, match=message):
            layers_of_text(text, 3)


def figures_of(costs: dict[str, float]) -> PlacementFigures:
    base, home = plain("1f1b", 2, 2)
    _, placement = place_preconditioning(base, home, Preconditioning(layers={0: 1, 1: 1}), costs)
    return PlacementFigures(placement=placement, period=13, period_plain=10, makespan_plain=10)


def test_what_does_not_fit_is_named_by_lane() -> None:
    assert placement_text(figures_of({})) == (
        "second-order work: 6 of 10 actions fit; a batch takes 13, 11 without COV and X_INV, 10 without any\n"
        "did not fit: rank0 0COV_G1 0X_INV0 (2), rank1 1COV_G1 1X_INV0 (2)\n"
    )
    costs = dict.fromkeys(("COV_A", "COV_G", "X_INV"), 0.0)
    assert placement_text(figures_of(costs)).endswith("\ndid not fit: nothing\n")


def test_the_summary_is_json() -> None:
    summary = placement_summary(figures_of({}))
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["period"], summary["period_without_work"], summary["period_bound"]) == (13, 11, 13)
    assert summary["lanes"]["rank0"]["unfit"] == ["0COV_G1", "0X_INV0"]
    assert summary["lanes"]["rank0"]["placed"][0] == {"action": "0COV_A0", "start": 2, "finish": 3}
