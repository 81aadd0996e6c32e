"""A stage whose row is walked by hand, action by action, with its activations on the host or counted."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor, nn

from bagpipe.pipeline.devices import open_streams
from bagpipe.pipeline.stage.activations import LaneActivations
from bagpipe.pipeline.stage.backward import Graph, Kept, SplitBackward, backward
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.loop import Template

__all__ = ["EXAMPLES", "ONE", "ROWS", "WIDTH", "Stage", "layers"]

WIDTH, EXAMPLES = 16, 8
#: The outputs of two hidden layers of a micro-batch, in float64. The last layer's output is the stage's own.
ONE = 2 * EXAMPLES * WIDTH * 8


class Stage:
    """A stage walked by hand. An action is called with its micro-batch."""

    def __init__(self, cells: str, module: nn.Module, *, moves: bool, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.row = tuple(parse(cell) for cell in cells.split())
        units = 1 + max(action.index or 0 for action in self.row)
        self.kept = LaneActivations(
            "activations0",
            [Template(op=action.op, unit=action.index or 0) for action in self.row],
            {0: units},
            streams=open_streams(device),
            moves=moves,
        )
        self.module = module.to(device)
        self._device = device
        self.gradients: list[Tensor] = []
        self._graphs: dict[int, Graph] = {}
        self._halves: dict[int, Kept] = {}
        self._split = SplitBackward([*module.parameters()])

    def run(self) -> None:
        """The whole row, with copies in a thread of their own."""
        actions = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}
        self.kept.lane.open()
        with closing(self.kept.lane):
            for action in self.row:
                self.kept.before(action.op, 0, actions[action.op])(action.index or 0)
        self.gradients += [p.grad for p in self.module.parameters() if p.grad is not None]

    def forward(self, index: int) -> None:
        values = torch.linspace(-1, 1, EXAMPLES * WIDTH, dtype=torch.float64, device=self._device) * (index + 1)
        leaf = values.view(EXAMPLES, WIDTH).requires_grad_()
        with self.kept.saving(self.module, [leaf]) as saving:
            output = self.module(leaf)
        self._graphs[index] = Graph([leaf], [output])
        self.kept.saved(0, index, saving, [output])

    def backward(self, index: int) -> None:
        graph = self._graphs.pop(index)
        backward(graph, [torch.ones_like(graph.roots[0])])
        self._note(graph)

    def inputs(self, index: int) -> None:
        graph = self._graphs.pop(index)
        self._halves[index] = self._split.inputs(graph, [torch.ones_like(graph.roots[0])])
        self._note(graph)

    def weights(self, index: int) -> None:
        self._split.weights(self._halves.pop(index))

    def _note(self, graph: Graph) -> None:
        assert graph.leaves[0].grad is not None
        self.gradients.append(graph.leaves[0].grad)


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(sizes[0], nn.Tanh(), sizes[1], nn.Tanh(), sizes[2])


ROWS = {
    "gpipe": "0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5",
    "1f1b": "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
    "last": "0F0 0B0 0F1 0B1",
    "zero-bubble": "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
}
