"""Layers in compiled code: what is captured of them is what hooks capture of the layers themselves."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense import compiler as compiled
from bagpipe.dense.compiler import Compiler
from bagpipe.dense.precision import Precision
from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.factors import BatchSums
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.dense.stage_module import DenseStage


class Layers(nn.Module):
    """A layer that is called twice, one on places, one without a gradient, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(3, 3), nn.Linear(3, 2, bias=False), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inner = torch.relu(self.first(torch.relu(self.first(x))))
        return self.second(inner.unsqueeze(1).expand(-1, 2, -1)), self.second(x.detach())


def stage_of(inner: nn.Module) -> DenseStage:
    return DenseStage(inner, Precision(), Compiler())


def opened(inner: nn.Module) -> LayerCapture:
    capture = LayerCapture(linear_layers(inner), range(len(linear_layers(inner))))
    capture.open()
    return capture


def sums(module: nn.Module, capture: LayerCapture, numbers: list[int]) -> dict[int, BatchSums]:
    """Sums of micro-batches, whose backwards come in another order than their forwards."""
    outputs = []
    for index in numbers:
        torch.manual_seed(index)
        x = torch.randn(5, 3, dtype=torch.float64)
        outputs.append(capture.during(index, partial(module, x))[0])
    for output in reversed(outputs):
        torch.autograd.backward(output.square().sum())
    for index in numbers:
        capture.add_inputs(index, 0)
        capture.add_outputs(index, 0, factor=2.0, num_examples=5)
    return capture.sums.pop(0)


@pytest.fixture(params=["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(compiled, "BACKEND", request.param)
    return str(request.param)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch")
@pytest.mark.timeout(600)
def test_the_sums_are_those_of_hooks(backend: str) -> None:
    torch.manual_seed(1)
    inner = Layers().double()
    plain = copy.deepcopy(inner)
    expected = sums(plain, opened(plain), [0, 1, 2])
    capture = opened(inner)
    stage = stage_of(inner)
    with torch.no_grad():
        stage(torch.randn(5, 3, dtype=torch.float64))  # an evaluation
    torch.autograd.backward(stage(torch.randn(5, 3, dtype=torch.float64))[0].sum())  # of no micro-batch
    found = sums(stage, capture, [0, 1, 2])
    assert found.keys() == expected.keys() == {0, 1}
    for number, own in expected.items():
        torch.testing.assert_close(found[number].inputs, own.inputs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[number].outputs, own.outputs, rtol=1e-12, atol=1e-12)
        assert found[number].counts.tolist() == own.counts.tolist()


def test_a_capture_of_the_same_layers_goes_on_with_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    inner = Layers().double()
    stage, first = stage_of(inner), opened(inner)
    expected = sums(stage, first, [0])
    first.close()
    stage(torch.randn(5, 3, dtype=torch.float64))  # nobody watches
    found = sums(stage, opened(inner), [0])
    assert all(torch.equal(found[number].inputs, own.inputs) for number, own in expected.items())
    assert all(torch.equal(found[number].outputs, own.outputs) for number, own in expected.items())
    assert first.sums == {}


def test_a_copy_is_watched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a stage in a second pipe: the hooks of its layers are copied with it."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    stage = stage_of(Layers().double())
    own = opened(stage.inner)
    twin = copy.deepcopy(stage)
    other = opened(twin.inner)
    assert sums(twin, other, [0]).keys() == {0, 1}
    assert own.sums == {}
    assert own.num_examples() == {}
    assert sums(stage, own, [0]).keys() == {0, 1}
    assert other.sums == {}


def test_a_backward_that_runs_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the halves of a split backward, which both pass the code."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    inner = nn.Sequential(nn.Linear(3, 2)).double()
    capture = opened(inner)

    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (self.inner(x),)

    stage = stage_of(Tuple())
    output = capture.during(0, lambda: stage(torch.ones(4, 3, dtype=torch.float64)))[0].sum()
    torch.autograd.backward(output, retain_graph=True)
    torch.autograd.backward(output)
    capture.add_outputs(0, 0, factor=1.0, num_examples=4)
    torch.testing.assert_close(capture.sums[0][0].outputs, torch.full((2, 2), 4.0, dtype=torch.float64))


def test_the_operators_follow_the_rules_of_operators() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 2, requires_grad=True)
    torch.library.opcheck(torch.ops.bagpipe.linear_call.default, (x, y, 1 << 40))
    torch.library.opcheck(torch.ops.bagpipe.linear_gradient.default, (x, torch.tensor(-1), 1 << 40))
