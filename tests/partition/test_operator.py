from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.partition.operator import Cost, Linear, Operator
from tests.partition.graphs import operator

LINEAR = Linear(weight_bytes=8, input_bytes=2, output_bytes=4, rows=False)


def row(**changes: object) -> dict[str, object]:
    return {"name": "a", "forward_per_example_s": 1, "backward_per_example_s": 2, **changes}


def test_a_cost_is_a_straight_line():
    assert Cost(fixed_s=2.0, per_example_s=0.5).at(10) == 7.0


@given(st.floats(0, 1e30), st.sampled_from([None, LINEAR]))
def test_a_row_round_trips(param_bytes: float, linear: Linear | None):
    one = operator("a", param_bytes=param_bytes + 8, entering_bytes=3)
    one = dataclasses.replace(one, linear=linear)
    assert Operator.from_row(one.to_row(), 0) == one


def test_rows_of_older_versions_have_no_linear_layer():
    one = Operator.from_row(row(), 0)
    assert (one.entering_bytes, one.linear) == (0, None)
    assert "linear" not in one.to_row()


def test_a_linear_layer_can_be_divided_both_ways_unless_its_row_says_otherwise():
    linear = {"weight_bytes": 8, "input_bytes": 2, "output_bytes": 4}
    one, other = (Operator.from_row(row(param_bytes=8, linear=each), 0) for each in (linear, linear | {"rows": False}))
    assert one.linear == dataclasses.replace(LINEAR, rows=True)
    assert other.linear == LINEAR


@pytest.mark.parametrize(
    ("linear", "message"),
    [
        (1, "operator 'a': linear: expected an object, got 1"),
        ({"weight_bytes": 1, "input_bytes": 1}, "operator 'a': linear: output_bytes is missing"),
        (
            {"weight_bytes": 1, "input_bytes": 1, "output_bytes": 1, "bias": 1},
            "operator 'a': linear: unknown key 'bias'; known: columns, rows, weight_bytes, input_bytes, output_bytes",
        ),
        (
            {"weight_bytes": 1, "input_bytes": 1, "output_bytes": 1, "rows": 1},
            "operator 'a': linear: rows must be true or false, got 1",
        ),
        (
            {"weight_bytes": 9, "input_bytes": 1, "output_bytes": 1},
            "operator 'a': linear: weight_bytes must be at most param_bytes, 8, got 9",
        ),
    ],
)
def test_a_bad_linear_layer_is_one_line(linear: object, message: str):
    with pytest.raises(InputError) as error:
        Operator.from_row(row(param_bytes=8, linear=linear), 0)
    assert str(error.value) == message
