"""An explicit K-FAC: per-example gradients one by one, and the inverse of the whole Kronecker product."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bagpipe.dense.precondition.kfac import KfacSettings

__all__ = ["Reference", "batch_of", "small_model"]

#: Ranks that are threads share torch's generator.
_SEEDING = threading.Lock()


def small_model(seed: int = 0) -> nn.Sequential:
    """Two layers with a bias and one without, in float64."""
    with _SEEDING:
        torch.manual_seed(seed)
        layers = (nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))
    return nn.Sequential(*layers).double()


def batch_of(step: int, num_examples: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs ``[num_examples, 4]`` and labels ``[num_examples]``."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(num_examples, 4, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).double()


class Reference:
    """Steps of SGD with preconditioned gradients, by definition.

    Args:
        model: as of `small_model`; not changed.
        settings: numbers; factors of the whole batch.
        lr: learning rate.
    """

    def __init__(self, model: nn.Sequential, settings: KfacSettings, lr: float) -> None:
        self.weights = [
            torch.cat([m.weight, m.bias[:, None]], 1).detach() if m.bias is not None else m.weight.detach().clone()
            for m in model
            if isinstance(m, nn.Linear)
        ]
        self._has_bias = [m.bias is not None for m in model if isinstance(m, nn.Linear)]
        self._settings = settings
        self._lr = lr
        self._factors: list[tuple[Tensor, Tensor]] = []
        self._inverses: list[Tensor] = []
        self._batch = 0
        self._late: list[tuple[Tensor, Tensor]] = []  # with a lag: factors of the batch before

    def step(self, inputs: Tensor, labels: Tensor, owned: Sequence[range] = ()) -> None:
        """One step with the mean loss over the examples.

        Args:
            inputs, labels: the batch.
            owned: by layer, the examples of its factors; empty: all of each.
        """
        settings, count = self._settings, len(inputs)
        per_layer = [([], []) for _ in self.weights]  # type: ignore[var-annotated]
        gradients = [torch.zeros_like(weight) for weight in self.weights]
        for example, label in zip(inputs, labels, strict=True):
            for number, (given, gradient) in enumerate(self._example(example, label)):
                per_layer[number][0].append(torch.outer(given, given))
                per_layer[number][1].append(torch.outer(gradient, gradient))
                gradients[number] += torch.outer(gradient, given) / count
        shares = owned or [range(count)] * len(per_layer)
        factors = [
            (sum(a[n] for n in own) / len(own), sum(g[n] for n in own) / len(own))
            for (a, g), own in zip(per_layer, shares, strict=True)
        ]
        batch, now = self._batch - settings.lag, self._late if settings.lag else factors
        if batch >= 0 and batch % settings.factor_every == 0:
            decay = settings.decay
            self._factors = [
                (decay * a + (1 - decay) * b, decay * g + (1 - decay) * h)
                for (a, g), (b, h) in zip(self._factors or now, now, strict=True)
            ]
        if batch >= 0 and batch % settings.inverse_every == 0:
            self._inverses = [_kronecker_inverse(a, g, settings.damping) for a, g in self._factors]
        self._late = factors
        found = gradients
        if self._inverses:
            found = [
                (inverse @ gradient.reshape(-1)).view(gradient.shape)
                for inverse, gradient in zip(self._inverses, gradients, strict=True)
            ]
        size = self._lr**2 * sum(float((a * b).sum()) for a, b in zip(found, gradients, strict=True))
        factor = min(1.0, math.sqrt(settings.kappa / abs(size))) if settings.kappa else 1.0
        for weight, gradient in zip(self.weights, found, strict=True):
            weight -= self._lr * factor * gradient
        self._batch += 1

    def _example(self, example: Tensor, label: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Input and output gradient of every layer, for one example."""
        given, outputs, hidden = [], [], example
        for number, (weight, has_bias) in enumerate(zip(self.weights, self._has_bias, strict=True)):
            given.append(torch.cat([hidden, hidden.new_ones(1)]) if has_bias else hidden)
            outputs.append((weight @ given[-1]).requires_grad_())
            hidden = torch.tanh(outputs[-1]) if number < 2 else outputs[-1]
        loss = nn.functional.binary_cross_entropy_with_logits(hidden.squeeze(), label)
        found = torch.autograd.grad(loss, outputs)
        return [(each.detach(), gradient) for each, gradient in zip(given, found, strict=True)]


def _kronecker_inverse(a: Tensor, g: Tensor, damping: float) -> Tensor:
    ratio = math.sqrt(float((a.trace() / len(a)) / (g.trace() / len(g))))
    shift = math.sqrt(damping)
    damped_a = a + ratio * shift * torch.eye(len(a), dtype=a.dtype)
    damped_g = g + shift / ratio * torch.eye(len(g), dtype=g.dtype)
    inverse: Tensor = torch.linalg.inv(torch.kron(damped_g, damped_a))
    return inverse
