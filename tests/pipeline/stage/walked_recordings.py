"""A stage of two inputs, one output and a loss, whose actions are called by hand: by recordings, or without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bagpipe.pipeline.stage.backward import Graph, SplitBackward
from bagpipe.pipeline.stage.graphs import Graphs
from bagpipe.pipeline.stage.recorded_stage import GraphCapture, RecordedMicroBatch, StageRecordings

__all__ = ["FULL", "HandStage"]

#: Examples of a batch: a loss is divided by it.
FULL, WIDTH = 12, 16


class _Layers(nn.Module):
    """A layer that is used twice, two biases that share a gradient, and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.top = nn.Linear(2 * WIDTH, WIDTH)
        self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.idle = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        self.calls += 1
        hidden = [torch.tanh(self.layer(value)) + (self.one + self.other) for value in (first, second)]
        return torch.tanh(self.top(torch.cat(hidden, 1)))


class HandStage:
    """Actions are methods, each called with a micro-batch.

    Args:
        graphs: captures; None: operator by operator.
        splits: the recordings of I and W are apart.
        device: of all tensors.

    Attributes:
        module: the stage.
        shown: by micro-batch, copies of its output and its loss.
        input_gradients: by micro-batch, of its inputs.
    """

    def __init__(self, graphs: Graphs | None, *, splits: bool = False, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.module = _Layers().to(device)
        self.shown: dict[int, list[Tensor]] = {}
        self.input_gradients: dict[int, list[Tensor | None]] = {}
        self._device = device
        self._recordings: StageRecordings | None = None
        if graphs is not None:
            capture = GraphCapture(graphs=graphs, full_batch=FULL)
            self._recordings = StageRecordings(capture, self._compute, module=self.module, splits=splits)
        self._split = SplitBackward([*self.module.parameters()])
        self._live: dict[int, tuple[list[Tensor], Graph | RecordedMicroBatch]] = {}

    def forward(self, index: int, *, size: int = 4, wants: Sequence[bool] = (True, True), scale: float = 1) -> None:
        """F of a micro-batch of that many examples, of whose inputs some want a gradient."""
        values = torch.linspace(-1, 1, 2 * size * WIDTH, device=self._device).view(2, size, WIDTH) * (index + 1)
        leaves = [value.clone().requires_grad_(want) for value, want in zip(values, wants, strict=True)]
        if self._recordings is None:
            shown, (output, loss) = self._compute(leaves)
            self._live[index] = (
                leaves,
                Graph([x for x in leaves if x.requires_grad], [output, loss * scale], self._split),
            )
        else:
            recorded = self._recordings.forward(leaves, scale)
            shown = recorded.shown
            self._live[index] = leaves, recorded
        self.shown[index] = [tensor.detach().clone() for tensor in shown]

    def backward(self, index: int) -> None:
        """B."""
        leaves, graph = self._live.pop(index)
        graph.backward([self._gradient(leaves)])
        self._keep(index, leaves)

    def inputs(self, index: int) -> None:
        """I."""
        leaves, graph = self._live[index]
        graph.backward_inputs([self._gradient(leaves)])
        self._keep(index, leaves)

    def weights(self, index: int) -> None:
        """W."""
        self._live.pop(index)[1].backward_weights()

    @property
    def gradients(self) -> list[Tensor | None]:
        """Of the parameters, so far."""
        return [parameter.grad for parameter in self.module.parameters()]

    def is_equal(self, other: HandStage) -> bool:
        """Whether all numbers have the same bits, and what has no gradient is the same."""
        ours, theirs = self._numbers(), other._numbers()
        return len(ours) == len(theirs) and all(
            one is two or (one is not None and two is not None and torch.equal(one, two))
            for one, two in zip(ours, theirs, strict=True)
        )

    def assert_close(self, other: HandStage) -> None:
        """Assert that all numbers are equal but for rounding."""
        for one, two in zip(self._numbers(), other._numbers(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)

    def _numbers(self) -> list[Tensor | None]:
        found: list[Tensor | None] = [*self.gradients, *self.module.buffers()]
        for index in sorted(self.shown):
            found += [*self.shown[index], *self.input_gradients.get(index, [])]
        return found

    def _gradient(self, leaves: Sequence[Tensor]) -> Tensor:
        return torch.full_like(leaves[0], 0.5)

    def _keep(self, index: int, leaves: Sequence[Tensor]) -> None:
        self.input_gradients[index] = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]

    def _compute(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        output = self.module(*inputs)
        loss = output.square().sum()
        return (output, loss), (output, loss / FULL)
