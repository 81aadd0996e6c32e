from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.schedule.formats.cost_text import amount, check_complete, check_stages, costs_of_json, costs_of_text
from tests.schedule.dense import dense


def test_costs_as_text() -> None:
    assert costs_of_text("F=1,2B=3.5,2F0=4", "--cost") == {"F": 1, "2B": 3.5, "2F0": 4}
    assert costs_of_text("", "--cost") == {}


def test_the_median_of_measured_durations_counts() -> None:
    assert costs_of_json('{"F": [9, 2, 1], "0B": 3}', "file") == {"F": 2, "0B": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F", "there: expected F=NUMBER, got 'F'"),
        ("F=x", "there: F: expected a number, got 'x'"),
        ("F=-1", "there: F: expected a number of at least 0, got -1"),
        ("BW=1", "there: unknown op 'BW'"),
    ],
)
def test_malformed_costs_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        costs_of_text(text, "there")


@pytest.mark.parametrize("text", ["[1]", "F=1", '{"F": "1"}', '{"F": [1, -1]}'])
def test_malformed_files_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="there: "):
        costs_of_json(text, "there")


def test_costs_of_another_model_are_refused() -> None:
    program = dense("zb-h1", 2, 4)
    check_complete({"F": 1, "I": 1, "0W": 1, "1W": 2}, program, "there")
    with pytest.raises(InputError, match="there: no duration for stage 1: expected 1W or W"):
        check_complete({"F": 1, "I": 1, "0W": 1}, program, "there")
    with pytest.raises(InputError, match="there: 7F names stage 7, expected one of 0 to 1"):
        check_stages({"7F": 1}, program, "there")


def test_amounts() -> None:
    assert (amount("x", "2"), amount("x", "0.5")) == (2, 0.5)
    with pytest.raises(InputError, match="x: expected a number of at least 0, got inf"):
        amount("x", "inf")
