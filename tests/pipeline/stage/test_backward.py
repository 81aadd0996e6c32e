"""I followed by W equals B: the same gradients for every shape of stage, all weights included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.seeding import seeded
from bagpipe.pipeline.stage.backward import Graph, SplitBackward, backward
from tests.split.models import NUM_DENSE, WIDTH, Aside, Node, Reused, Top


class TwoBiases(nn.Module):
    """One matrix, used twice, each time with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        hidden = nn.functional.linear(values, self.matrix, self.first).tanh()
        return nn.functional.linear(hidden, self.matrix, self.second).tanh()


STAGES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one-output": (lambda: Node(2 * WIDTH, 1), 2),
    "views": (lambda: Node(2 * WIDTH, 2), 2),
    "an output made of another": (lambda: Top(2 * WIDTH, passes_on=True), 2),
    "a layer used often": (Reused, 3),
    "weights that no input meets": (Aside, 1),
    "no weights": (nn.Identity, 1),
    "a matrix with two biases": (TwoBiases, 1),
}


class Stage:
    """A stage with inputs; the first input of `Aside` is dense and without gradient. Can compute a loss."""

    def __init__(self, name: str, with_loss: bool = False, wants_grad: bool = True) -> None:
        make, count = STAGES[name]
        with seeded(3, torch.device("cpu")):
            self.module = make().double()
            self.leaves = [torch.randn(5, WIDTH, dtype=torch.float64) for _ in range(count)]
            dense = [torch.randn(5, NUM_DENSE, dtype=torch.float64)] if name.startswith("weights") else []
            for leaf in self.leaves:
                leaf.requires_grad_(wants_grad)
            self.arguments = [*dense, *self.leaves]
            results = self.module(*self.arguments)
            outputs = list(results) if isinstance(results, tuple) else [results]
            self.gradients = [torch.randn_like(output) for output in outputs]
        loss = [torch.stack([output.square().sum() for output in outputs]).sum()] if with_loss else []
        self.graph = Graph([leaf for leaf in self.leaves if leaf.requires_grad], [*outputs, *loss])

    def again(self) -> Graph:
        """The graph of one more micro-batch, with the same values."""
        results = self.module(*self.arguments)
        outputs = list(results) if isinstance(results, tuple) else [results]
        return Graph(self.graph.leaves, outputs)

    def found(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in (*self.leaves, *self.module.parameters())]


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_the_halves_give_the_gradients_of_the_whole(name: str, with_loss: bool) -> None:
    whole, halves = Stage(name, with_loss), Stage(name, with_loss)
    backward(whole.graph, whole.gradients)
    split = SplitBackward(list(halves.module.parameters()))
    kept = split.inputs(halves.graph, halves.gradients)
    assert all(leaf.grad is not None for leaf in halves.leaves)
    assert all(parameter.grad is None for parameter in halves.module.parameters())
    split.weights(kept)
    for one, other in zip(whole.found(), halves.found(), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", STAGES)
def test_hooks_take_each_gradient_of_the_second_half(name: str) -> None:
    """As those that autograd calls; a gradient of a second micro-batch is added to what was taken."""
    plain, hooked = Stage(name), Stage(name)
    taken: dict[nn.Parameter, Tensor] = {}

    def take(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        taken[parameter] = taken[parameter] + parameter.grad if parameter in taken else parameter.grad
        parameter.grad = None

    for parameter in hooked.module.parameters():
        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    for stage in (plain, hooked):
        split = SplitBackward(list(stage.module.parameters()))
        for _ in range(2):
            split.weights(split.inputs(stage.graph, stage.gradients))
            stage.graph = stage.again()
    for one, other in zip(plain.module.parameters(), hooked.module.parameters(), strict=True):
        assert other.grad is None
        assert one.grad is None or torch.equal(one.grad, taken[other])


def test_the_first_half_computes_all_input_gradients() -> None:
    """PyTorch's stages ignore pooled vectors that enter in the middle of a pipeline as keyword arguments."""
    stage = Stage("one-output")
    kept = SplitBackward(list(stage.module.parameters())).inputs(stage.graph, stage.gradients)
    assert [leaf.grad is not None for leaf in stage.leaves] == [True, True]
    assert kept.groups


def test_without_inputs_the_second_half_computes_all_gradients() -> None:
    whole, halves = Stage("views", wants_grad=False), Stage("views", wants_grad=False)
    backward(whole.graph, whole.gradients)
    split = SplitBackward(list(halves.module.parameters()))
    kept = split.inputs(halves.graph, halves.gradients)
    assert all(gradient is None for gradient in halves.found())
    split.weights(kept)
    assert all(torch.equal(a, b) for a, b in zip(whole.found(), halves.found(), strict=True) if a is not None)


def test_gradients_add_up_over_micro_batches() -> None:
    for name in STAGES:
        stage = Stage(name)
        split = SplitBackward(list(stage.module.parameters()))
        for _ in range(2):
            again = Stage(name)
            results = stage.module(*again.arguments)
            graph = Graph(again.leaves, list(results) if isinstance(results, tuple) else [results])
            split.weights(split.inputs(graph, stage.gradients))
        once = Stage(name)
        backward(once.graph, once.gradients)
        for twice, one in zip(stage.module.parameters(), once.module.parameters(), strict=True):
            assert (twice.grad is None) == (one.grad is None)
            if one.grad is not None and twice.grad is not None:
                torch.testing.assert_close(twice.grad, 2 * one.grad, rtol=0, atol=1e-13)


def test_an_empty_backward() -> None:
    constant = Graph([], [torch.ones(3)])
    backward(constant, [torch.ones(3)])
    split = SplitBackward([])
    split.weights(split.inputs(constant, [torch.ones(3)]))


@pytest.mark.parametrize("apart", [False, True])
def test_summed_weights_have_separate_gradients(apart: bool) -> None:
    """`apart`: no input with a gradient meets the weights."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    split = SplitBackward([first, second])
    for _ in range(3):
        leaf, bias = torch.ones(3, 2, requires_grad=True), first + second
        roots = [leaf * 2, bias.expand(3, 2)] if apart else [leaf * 2 + bias]
        split.weights(split.inputs(Graph([leaf], roots), [torch.ones(3, 2) for _ in roots]))
    assert first.grad is not None
    assert second.grad is not None
    assert first.grad.tolist() == second.grad.tolist() == [9.0, 9.0]


class Half(nn.Module):
    """A layer that meets an input with a gradient and one without, and two biases behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.top = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        hidden = [torch.tanh(self.layer(value)) + (self.one + self.other) for value in (first, second)]
        return torch.tanh(self.top(torch.cat(hidden, 1)))


def test_where_nodes_lie_in_memory_decides_nothing() -> None:
    """Torch visits the nodes of a graph in the order of their addresses, which differ from one graph to the next."""
    with seeded(3, torch.device("cpu")):
        module = Half()
        leaf, other = torch.randn(5, WIDTH, requires_grad=True), torch.randn(5, WIDTH)
    split = SplitBackward([*module.parameters()])
    found: list[list[Tensor | None]] = []
    kept_alive = []
    for _ in range(20):
        graph = Graph([leaf], [module(leaf, other)])
        split.weights(split.inputs(graph, [torch.ones(5, WIDTH)]))
        found.append([parameter.grad for parameter in module.parameters()])
        kept_alive.append(module(leaf, other))  # so that the next graph lies elsewhere
        module.zero_grad()
    for gradients in found[1:]:
        assert all(
            torch.equal(one, two)
            for one, two in zip(found[0], gradients, strict=True)
            if one is not None and two is not None
        )
