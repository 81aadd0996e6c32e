"""The serial reference of asynchronous schedules against loops written by hand, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bagpipe.dense.lamb import Lamb
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.prediction import WeightPredictor
from bagpipe.pipeline.stage.serial_versions import Backwards, SerialStage, SerialVersions, TrainedBatch
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, DENSE_SCHEDULES

BATCHES = 30
MICRO = 4
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def modules(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    ends = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count - 1)]
    return [*(module.double() for module in ends), nn.Linear(5, 1).double()]


def data() -> list[list[tuple[Tensor, Tensor]]]:
    """Per batch its micro-batches of unequal sizes: (inputs, targets)."""
    generator = torch.Generator().manual_seed(11)
    sizes = [2, 3, 1, 2][:MICRO]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [[(normal(n, 5), normal(n, 1)) for n in sizes] for _ in range(BATCHES)]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """Share of a micro-batch in the mean over the batch's 8 examples."""
    return (output - target).square().sum() / 8


class Reference:
    """A chain of stages, trained serially by a program."""

    def __init__(
        self, program: Program, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], count: int
    ) -> None:
        self.stages = modules(count)
        self.serial = SerialVersions(
            [
                SerialStage(module=module, inputs=(f"h{n}",), outputs=(f"h{n + 1}",))
                for n, module in enumerate(self.stages)
            ],
            lambda number, parameters: make(parameters),
            lambda values: mean_loss(values[f"h{count}"], values["target"]),
            program,
        )

    def train(self) -> list[float]:
        return [
            self.serial.train([{"h0": inputs, "target": target} for inputs, target in batch]).loss for batch in data()
        ]

    def parameters(self) -> list[Tensor]:
        return [tensor for stage in range(len(self.stages)) for tensor in self.serial.parameters(stage).values()]


def program(name: str, count: int) -> Program:
    return ASYNCHRONOUS_SCHEDULES[name].loop(chain(count, MICRO)).unroll(BATCHES)


def by_hand(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], count: int, delay: int
) -> tuple[list[float], list[Tensor]]:
    """``w_next = opt(w, gradient at w of `delay` batches before)``."""
    model = nn.Sequential(*modules(count))
    optimizer = make(list(model.parameters()))
    losses, versions = [], []
    for batch in data():
        versions.append({n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()})
        weights = versions[max(0, len(versions) - 1 - delay)]
        total = sum(mean_loss(functional_call(model, weights, (x,)), y) for x, y in batch)
        gradients = torch.autograd.grad(total, list(weights.values()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, [parameter.detach() for parameter in model.parameters()]


def assert_close(first: tuple[list[float], list[Tensor]], second: tuple[list[float], list[Tensor]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-12, abs=1e-12)
    for a, b in zip(first[1], second[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_synchronous_program_is_plain_training(name: str) -> None:
    reference = Reference(DENSE_SCHEDULES["1f1b"].build(chain(2, MICRO)), OPTIMIZERS[name], 2)
    assert_close((reference.train(), reference.parameters()), by_hand(OPTIMIZERS[name], 2, 0))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_buffered_weights_are_one_update_behind(name: str, count: int) -> None:
    reference = Reference(program("pipedream-2bw", count), OPTIMIZERS[name], count)
    found = (reference.train(), reference.parameters())
    assert_close(found, by_hand(OPTIMIZERS[name], count, 1))
    newest = Reference(program("pipedream", count), OPTIMIZERS[name], count)
    assert newest.train() != pytest.approx(found[0], rel=1e-6), "the newest version at F is another computation"


def test_vertical_sync_is_the_delay_of_the_first_stage() -> None:
    reference = Reference(program("pipedream-vertical", 4), OPTIMIZERS["adam"], 4)
    assert_close((reference.train(), reference.parameters()), by_hand(OPTIMIZERS["adam"], 4, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pipeoptim_by_hand(name: str) -> None:
    """Three stages: forwards of the first two have predicted weights; backwards the newest, with these activations."""
    reference = Reference(program("pipeoptim", 3), OPTIMIZERS[name], 3)
    first, second, last = modules(3)
    linears: list[nn.Linear] = [first[0], second[0], last]  # type: ignore[index, list-item]
    optimizers = [OPTIMIZERS[name](list(linear.parameters())) for linear in linears]
    predictors = [WeightPredictor(optimizer) for optimizer in optimizers[:2]]
    predicted = [[p.detach().clone() for p in linear.parameters()] for linear in linears[:2]]
    losses = []
    for batch in data():
        total = 0.0
        for inputs, target in batch:
            layers = [inputs]
            for weight, bias in predicted:
                layers.append(torch.tanh(layers[-1] @ weight.T + bias))
            error = last(layers[-1]).detach() - target
            total += float(error.square().sum() / 8)
            slope = error / 4
            for linear, layer in zip(reversed(linears), reversed(layers), strict=True):
                for parameter, gradient in zip(linear.parameters(), (slope.T @ layer, slope.sum(0)), strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                slope = (slope @ linear.weight.detach()) * (1 - layer.square())
        for predictor, linear, out in zip(predictors, linears, predicted, strict=False):
            # for the next batch, before this one's step
            predictor.predict(1, dict(zip(linear.parameters(), out, strict=True)))
        for optimizer in optimizers:
            optimizer.step()
        for predictor in predictors:
            predictor.stepped()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    assert_close(
        (reference.train(), reference.parameters()), (losses, [p for each in linears for p in each.parameters()])
    )


def test_gradients_of_given_values_and_values_that_skip_stages() -> None:
    """A value used by two stages gets the sum of both gradients; given values that ask for a gradient get theirs."""
    torch.manual_seed(0)
    first, last = nn.Linear(3, 3).double(), nn.Linear(6, 1).double()

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = last

        def forward(self, hidden: Tensor, vector: Tensor) -> Tensor:
            return self.last(torch.cat([hidden, vector], 1))

    serial = SerialVersions(
        [
            SerialStage(module=first, inputs=("vector",), outputs=("hidden",)),
            SerialStage(module=Joined(), inputs=("hidden", "vector"), outputs=("logit",)),
        ],
        lambda number, parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda values: values["logit"].square().sum(),
        DENSE_SCHEDULES["gpipe"].build(chain(2, 1)),
    )
    vector = torch.randn(2, 3).double().requires_grad_()
    last(torch.cat([first(vector), vector], 1)).square().sum().backward()
    trained = serial.train([{"vector": vector.detach().requires_grad_()}])
    torch.testing.assert_close(trained.gradients[0]["vector"], vector.grad, rtol=1e-12, atol=1e-12)


def test_an_optimizer_without_a_rule_is_refused_where_weights_are_predicted() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Lamb(parameters, lr=0.01)

    with pytest.raises(InputError, match="the weights of Lamb cannot be predicted"):
        Reference(program("pipeoptim", 2), make, 2)
    Reference(program("pipedream", 2), make, 2)


def trained_once(
    backwards: Backwards, *, is_stepped: bool = True
) -> tuple[list[Tensor], TrainedBatch, list[Tensor | None]]:
    """Weights after the first batch, what it gave, and the gradients before its steps; SGD with a rate of 1."""
    stages = modules(2)
    gradients: list[Tensor | None] = []

    def prepare(trained: TrainedBatch) -> bool:
        gradients.extend(parameter.grad for stage in stages for parameter in stage.parameters())
        return is_stepped

    serial = SerialVersions(
        [SerialStage(module=module, inputs=(f"h{n}",), outputs=(f"h{n + 1}",)) for n, module in enumerate(stages)],
        lambda number, parameters: torch.optim.SGD(parameters, lr=1.0),
        lambda values: mean_loss(values["h2"], values["target"]),
        DENSE_SCHEDULES["1f1b"].build(chain(2, MICRO)),
        prepare,
    )
    trained = serial.train([{"h0": x.clone().requires_grad_(), "target": y} for x, y in data()[0]], backwards)
    return [parameter.detach() for stage in stages for parameter in stage.parameters()], trained, gradients


def test_backwards_that_are_left_out_give_nothing() -> None:
    """Micro-batches 1 and 3 reach the last stage alone, and micro-batch 2 none."""
    computed = [{0, 1}, {1}, set(), {1}]
    *_, trained, gradients = trained_once(Backwards(computed=computed, factors={0: 4.0, 1: 1.6}, scale=8.0))
    model = nn.Sequential(*modules(2))
    losses, inputs = [], []
    for x, y in data()[0]:
        inputs.append(x.clone().requires_grad_())
        losses.append(mean_loss(model(inputs[-1]), y))
    first = [*model[0].parameters(), inputs[0]]
    expected = [4.0 * gradient for gradient in torch.autograd.grad(losses[0], first, retain_graph=True)]
    total = losses[0] + losses[1] + losses[3]
    expected[2:2] = [1.6 * gradient for gradient in torch.autograd.grad(total, list(model[1].parameters()))]
    for found, gradient in zip([*gradients, trained.gradients[0]["h0"]], expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-13, atol=1e-13)
    assert [sorted(own) for own in trained.gradients] == [["h0"], [], [], []]


def test_a_stage_without_a_backward_and_a_batch_that_is_left_out_make_no_step() -> None:
    before = [parameter.detach() for stage in modules(2) for parameter in stage.parameters()]
    after, _, gradients = trained_once(Backwards(computed=[{1}] * MICRO))
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, True, False, False]
    assert gradients[:2] == [None, None]
    after, *_ = trained_once(Backwards(), is_stepped=False)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
