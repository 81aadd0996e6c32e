"""`KfacOptimizer` in a plain loop equals K-FAC by its definition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import binary_cross_entropy_with_logits

from bagpipe.dense.precondition.kfac import KfacSettings
from bagpipe.dense.precondition.optimizer import KfacOptimizer
from bagpipe.errors import InputError
from tests.dense.precondition.reference import Reference, batch_of, small_model

LR = 0.3


def train(model: nn.Sequential, optimizer: KfacOptimizer, first: int, end: int, parts: int = 1) -> None:
    for step in range(first, end):
        inputs, labels = batch_of(step)
        for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            backward(binary_cross_entropy_with_logits(model(x).squeeze(1), y) / parts)
        optimizer.step()
        optimizer.zero_grad()


def with_bias(model: nn.Sequential) -> list[Tensor]:
    """The weights, those of a bias as their last column."""
    linear = [module for module in model if isinstance(module, nn.Linear)]
    return [torch.cat([m.weight, m.bias[:, None]], 1) if m.bias is not None else m.weight for m in linear]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        KfacSettings(),
        KfacSettings(kappa=0.0, damping=0.1, decay=0.5),
        KfacSettings(factor_every=2, inverse_every=4, kappa=1e-5),
    ],
)
def test_equals_the_inverse_of_the_kronecker_product(settings: KfacSettings, parts: int) -> None:
    model = small_model()
    reference = Reference(model, settings, LR)
    train(model, KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR), settings=settings), 0, 6, parts)
    for step in range(6):
        reference.step(*batch_of(step))
    for weight, expected in zip(with_bias(model), reference.weights, strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-10)


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    settings = KfacSettings(inverse_every=3)
    model = small_model()
    optimizer = KfacOptimizer(model, torch.optim.Adam(model.parameters(), lr=LR), settings=settings)
    train(model, optimizer, 0, 4)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, 4, 8)
    again = small_model(seed=1)
    again.load_state_dict(weights)
    resumed = KfacOptimizer(again, torch.optim.Adam(again.parameters(), lr=LR), settings=settings)
    resumed.load_state_dict(state)
    train(again, resumed, 4, 8)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_other_parameters_are_stepped_with_their_gradient() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    inputs, labels = batch_of(0)
    backward(binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels))
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    after = [parameter.detach() for parameter in model.parameters()]
    assert torch.equal(after[0], before[0] - plain[0])
    assert not torch.allclose(after[2], before[2] - plain[2])


def test_hooks_and_new_groups_are_those_of_the_optimizer() -> None:
    model, late = small_model(), nn.Parameter(torch.ones(1))
    optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.add_param_group({"params": [late]})
    train(model, optimizer, 0, 1)
    assert calls == ["before", "after"]
    assert optimizer.param_groups[1]["params"][0] is late


class Folded(nn.Module):
    """Attention over the ids of an example, with a layer on all ids of the batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 3)
        self.top = nn.Linear(3, 1)

    def forward(self, places: Tensor) -> Tensor:
        hidden = torch.tanh(self.attention(places.reshape(-1, 4))).view(len(places), -1, 3)
        scores: Tensor = self.top(hidden.mean(1)).squeeze(1)
        return scores


def test_layers_on_folded_places_count_examples() -> None:
    torch.manual_seed(0)
    model = Folded().double()
    optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
    places = torch.randn(8, 5, 4, dtype=torch.float64)
    logits = model(places)
    labels = torch.ones(8, dtype=torch.float64)
    backward(binary_cross_entropy_with_logits(logits, labels))
    optimizer.step()
    kfac = optimizer.state_dict()["kfac"]
    gradients = torch.sigmoid(logits.detach()) - labels
    torch.testing.assert_close(kfac["top.factor_g"].trace(), (gradients**2).mean())
    assert kfac["attention.factor_g"].trace() < kfac["top.factor_g"].trace()


def test_a_loss_scale_and_a_number_of_examples_can_be_said() -> None:
    found = []
    for scale, count in ((1.0, None), (1024.0, 6)):
        model = small_model()
        optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
        inputs, labels = batch_of(0)
        backward(binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels) * scale)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        optimizer.step(num_examples=count, loss_scale=scale)
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_copies_of_the_model_and_forwards_without_a_backward_are_left_out() -> None:
    model, twin = small_model(), small_model()
    optimizers = [KfacOptimizer(each, torch.optim.SGD(each.parameters(), lr=LR)) for each in (model, twin)]
    average = torch.optim.swa_utils.AveragedModel(model)
    inputs, labels = batch_of(0)
    average(inputs)
    model(batch_of(1)[0])
    model.eval()
    model(batch_of(2)[0])
    model.train()
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        backward(binary_cross_entropy_with_logits(each(inputs).squeeze(1), labels))
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(TypeError, match="make another one, and load its state_dict"):
        copy.deepcopy(optimizers[0])


def test_schedulers_see_the_groups_of_the_optimizer() -> None:
    model = small_model()
    optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, 0, 1)
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == LR / 2


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Sequential(nn.LayerNorm(3)), KfacSettings(), "K-FAC needs a model with a trainable torch.nn.Linear"),
        (nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(2, 2)), KfacSettings(), "0 is a Conv1d"),
        (nn.Sequential(nn.Linear(2, 2)), KfacSettings(lag=1), "expected lag 0, got 1"),
    ],
)
def test_refused(model: nn.Sequential, settings: KfacSettings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR), settings=settings)


def test_a_singular_factor_without_damping() -> None:
    model = small_model()
    settings = KfacSettings(damping=0.0)
    optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=LR), settings=settings)
    inputs, labels = batch_of(0, num_examples=2)  # fewer examples than inputs
    backward(binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels))
    with pytest.raises(InputError, match=r"factor A of layer 0, of dimension 5, is singular with damping 0"):
        optimizer.step()
