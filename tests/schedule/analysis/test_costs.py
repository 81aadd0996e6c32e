from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.costs import cost_function, measured_costs
from bagpipe.schedule.ir.actions import parse


def test_the_most_specific_cost_wins() -> None:
    cost = cost_function({"0F1": 10, "F": 5, "0F": 4})
    assert [cost(parse(cell)) for cell in ("0F1", "0F2", "1F0", "0B0")] == [10, 4, 5, 2]
    assert cost_function(lambda action: 7)(parse("0F0")) == 7


def test_an_overlap_costs_its_parts_unless_it_is_listed() -> None:
    overlap = parse("(0F0;1B0)OVERLAP_F_B")
    assert cost_function(None)(overlap) == 3
    assert cost_function({"OVERLAP_F_B": 2.5})(overlap) == 2.5
    assert cost_function({"OVERLAP_F_B": 2.5, "(0F0;1B0)OVERLAP_F_B": 2})(overlap) == 2


def test_measured_costs_are_medians() -> None:
    assert measured_costs({"F": [5.0, 1.0, 2.0], "B": []}) == {"F": 2.0}


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match="0F0: expected a cost of at least 0, got -1"):
        cost_function({"F": -1})(parse("0F0"))
