"""`LayerCapture`: sums of inputs and output gradients, one micro-batch at a time."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.layers import linear_layers


class Sequence(nn.Module):
    """A layer that is called on every place of an example, and once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, places: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.relu(self.layer(places))).sum(1)
        return found


def opened(model: nn.Module) -> LayerCapture:
    capture = LayerCapture(linear_layers(model), [0])
    capture.open()
    return capture


def test_sums_of_two_micro_batches_are_those_of_the_batch() -> None:
    model = nn.Linear(3, 2).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)
    whole, parts = opened(model), opened(model)
    whole.during(0, lambda: model(inputs)).sum().backward()
    whole.add_inputs(0, 0)
    whole.add_outputs(0, 0, factor=1.0, num_examples=6)
    for unit, part in enumerate(inputs.chunk(2)):
        parts.during(unit, partial(model, part)).sum().backward()
    for unit in range(2):
        parts.add_inputs(unit, 0)
        parts.add_outputs(unit, 0, factor=1.0, num_examples=3)
    a, b = whole.sums[0][0], parts.sums[0][0]
    ones = torch.cat([inputs, torch.ones(6, 1)], 1)
    torch.testing.assert_close(a.inputs, ones.T @ ones)
    torch.testing.assert_close(a.outputs, torch.full((2, 2), 6.0, dtype=torch.float64))
    torch.testing.assert_close(a.inputs, b.inputs)
    assert a.counts.tolist() == b.counts.tolist() == [6, 6]


def test_inputs_can_be_added_up_before_the_backward() -> None:
    model = nn.Linear(3, 2)
    capture = opened(model)
    output = capture.during(0, lambda: model(torch.randn(4, 3)))
    capture.add_inputs(0, 0)
    output.sum().backward()
    capture.add_outputs(0, 0, factor=1.0, num_examples=4)
    assert capture.sums[0][0].counts.tolist() == [4, 4]
    capture.add_outputs(0, 0, factor=1.0, num_examples=4)
    assert capture.sums[0][0].counts.tolist() == [4, 4]


def test_places_of_sequences_are_terms_and_examples_are_counted_once() -> None:
    model = Sequence()
    capture = opened(model)
    capture.during(0, lambda: model(torch.randn(5, 4, 2))).sum().backward()
    assert capture.num_examples() == {0: 5}
    capture.add_inputs(0, 0)
    capture.add_outputs(0, 0, factor=1.0, num_examples=5)
    assert capture.sums[0][0].counts.tolist() == [2 * 5 * 4, 5]


def test_only_forwards_with_gradients_that_are_asked_for_are_captured() -> None:
    model = nn.Linear(3, 2)
    capture = opened(model)
    with torch.no_grad():
        capture.during(0, lambda: model(torch.randn(2, 3)))
    model(torch.randn(2, 3)).sum().backward()
    capture.add_inputs(0, 0)
    assert capture.sums == {}
    capture.close()
    capture.during(1, lambda: model(torch.randn(2, 3))).sum().backward()
    capture.add_inputs(1, 0)
    assert capture.sums == {}


def test_a_batch_that_is_left_out_leaves_nothing() -> None:
    model = nn.Linear(3, 2)
    capture = opened(model)
    capture.during(0, lambda: model(torch.randn(2, 3))).sum().backward()
    capture.add_inputs(0, 0)
    capture.add_outputs(0, 0, factor=1.0, num_examples=2)
    capture.drop(0)
    assert capture.sums == {}
    assert capture.num_examples() == {}


def test_copies_of_the_module_are_not_captured() -> None:
    model = nn.Linear(3, 2)
    capture = opened(model)
    twin = copy.deepcopy(model)
    capture.during(0, lambda: twin(torch.randn(2, 3))).sum().backward()
    capture.add_inputs(0, 0)
    assert capture.sums == {}


def test_calls_by_name_and_several_backwards() -> None:
    model = nn.Linear(3, 2)
    first, adding = opened(model), LayerCapture(linear_layers(model), [0], adds=True)
    adding.open()
    for capture in (first, adding):
        output = capture.during(0, lambda: model(input=torch.ones(1, 3)))
        output.sum().backward(retain_graph=True)
        output.sum().backward()
        capture.add_outputs(0, 0, factor=1.0, num_examples=1)
    assert first.sums[0][0].outputs.tolist() == [[1, 1], [1, 1]]
    assert adding.sums[0][0].outputs.tolist() == [[4, 4], [4, 4]]
