from __future__ import annotations

import json

import pytest
from hypothesis import given

from bagpipe.errors import InputError
from bagpipe.partition.operators import OperatorGraph, members, union
from tests.partition.graphs import graph, operator, operator_graphs


@given(operator_graphs(7))
def test_json_round_trips(operators: OperatorGraph):
    assert OperatorGraph.from_json(operators.to_json()) == operators


def test_optional_numbers_are_0_in_json():
    text = '{"operators": [{"name": "a", "forward_per_example_s": 1, "backward_per_example_s": 2}]}'
    only = OperatorGraph.from_json(text).operators[0]
    assert (only.forward.fixed_s, only.forward.per_example_s, only.param_bytes) == (0, 1, 0)


def row(**changes: object) -> dict[str, object]:
    return {"name": "a", "forward_per_example_s": 1, "backward_per_example_s": 2, **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "m.json: expected an object with 'operators' and 'edges'"),
        ({"operators": [], "nodes": []}, "m.json: expected an object with 'operators' and 'edges'"),
        ({"operators": {}}, "m.json: 'operators' and 'edges' must be lists"),
        ({"operators": []}, "m.json: an operator graph needs at least one operator, got none"),
        ({"operators": [{}]}, "m.json: operator 0: expected an object with a 'name'"),
        ({"operators": [{"name": "a"}]}, "m.json: operator 'a': forward_per_example_s is missing"),
        ({"operators": [row(flops=1)]}, "m.json: operator 'a': unknown key 'flops'; known: name, forward_fixed_s"),
        ({"operators": [row(param_bytes=-1)]}, "'a': param_bytes must be a number of at least 0, got -1"),
        ({"operators": [row(param_bytes="2")]}, "'a': param_bytes must be a number of at least 0, got '2'"),
        ({"operators": [row(param_bytes=float("nan"))]}, "'a': param_bytes must be a number of at least 0, got nan"),
        ({"operators": [row(param_bytes=1e308)]}, "'a': param_bytes must be at most 1e+30"),
        ({"operators": [row(param_bytes=10**400)]}, "'a': param_bytes must be at most 1e+30"),
        ({"operators": [row(name="a\nb")]}, r"operator 0: expected a name of printable characters, got 'a\nb'"),
        ({"operators": [row(), row()]}, "m.json: operator 'a' appears twice"),
        ({"operators": [row()], "edges": [["a", "b"]]}, "m.json: edge a -> b: unknown operator 'b'; known: a"),
        ({"operators": [row()], "edges": ["ab"]}, "m.json: expected an edge as [producer, consumer], got 'ab'"),
        ({"operators": [row()], "edges": [["a", "a"]]}, "m.json: the operator graph has a cycle: a -> a"),
        (
            {"operators": [row(), row(name="b")], "edges": [["a", "b"], ["a", "b"]]},
            "m.json: edge a -> b appears twice",
        ),
    ],
)
def test_bad_json_is_one_line(data: object, message: str):
    with pytest.raises(InputError) as error:
        OperatorGraph.from_json(json.dumps(data), source="m.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ['{"operators":', "[" * 200_000, "1" * 5000], ids=["cut", "deep", "digits"])
def test_text_that_json_cannot_hold(text: str):
    with pytest.raises(InputError, match=r"^m\.json: not JSON: "):
        OperatorGraph.from_json(text, source="m.json")


def test_text_that_is_not_json():
    with pytest.raises(InputError, match="not JSON"):
        OperatorGraph.from_json("{")


def test_a_cycle_error_lists_its_operators():
    with pytest.raises(InputError, match="cycle: b -> c -> d -> b"):
        graph(["ab", "bc", "cd", "db", "de"])


def test_the_order_finishes_a_branch_first():
    fork = graph(["ab", "bc", "cf", "ad", "de", "ef"])
    assert "".join(fork.names(fork.everything)) == "abcdef"


@given(operator_graphs(7))
def test_descendants(operators: OperatorGraph):
    place = {number: place for place, number in enumerate(operators.order)}
    for number, later in enumerate(operators.descendants):
        assert all(place[number] < place[other] for other in members(later))
        assert operators.consumers[number] & ~later == 0
        assert later == operators.consumers[number] | union(
            operators.descendants[c] for c in members(operators.consumers[number])
        )


def test_a_chain_is_one():
    assert graph(["ab", "bc", "ac"]).is_chain
    assert not graph(["ab", "ac"]).is_chain
    assert OperatorGraph(operators=(operator("a"),)).is_chain


def test_masks():
    assert members(0b10110) == [1, 2, 4]
    assert union([1, 4, 4]) == 5
