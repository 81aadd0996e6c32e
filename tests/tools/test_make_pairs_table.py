"""The documented table of pairs equals the generated one."""

from __future__ import annotations

import pytest

from tools.make_pairs_table import AXES, PAGE, PARTS, merged, problem, rewritten


def test_the_documented_pairs_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page) == page, "run python -m tools.make_pairs_table"


@pytest.mark.parametrize("name", [*AXES, *PARTS])
def test_every_way_is_possible_by_itself(name: str) -> None:
    values = {**AXES, **PARTS}[name]
    assert problem(values, values) == ""


def test_a_kind_of_schedule_wins_over_plain_stages() -> None:
    pair = merged(AXES["stages"], AXES["free order"])
    assert pair is not None
    assert pair["pipeline.schedule"] == "dynamic"
    assert merged(AXES["free order"], AXES["stages"]) == pair
    assert merged(AXES["free order"], AXES["asynchronous schedule"]) is None
