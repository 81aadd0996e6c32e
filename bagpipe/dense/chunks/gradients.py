"""`KeptGradients`: the gradients of a batch, each in its chunk from the moment that autograd has it.

autograd ──take──> chunk of gradients, one more micro-batch is added there ──> step
                   └─show──> `grad`, summed over ranks ──take_shown──┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bagpipe.dense.chunks.arena import Part
from bagpipe.dense.chunks.layout import ChunkLayout, Place
from bagpipe.dense.chunks.units import gradient_moment
from bagpipe.dense.chunks.walker import Walker
from bagpipe.errors import InputError

__all__ = ["KeptGradients"]


class KeptGradients:
    """See above.

    Args:
        walker: gives moments their chunks.
        layout: of all chunks.
        places: of each parameter.
        names: of each parameter.

    Attributes:
        marks: by name of the parameters with a gradient in this batch: its largest magnitude, a scalar that is finite
            if all its elements are.
    """

    def __init__(
        self,
        walker: Walker,
        layout: ChunkLayout,
        places: Mapping[nn.Parameter, Place],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self.marks: dict[str, Tensor] = {}
        self._walker = walker
        self._arena = walker.arena
        self._layout = layout
        self._places = places
        self._names = names
        self._kept: dict[nn.Parameter, Tensor] = {}

    def of(self, parameters: Iterable[nn.Parameter]) -> Mapping[nn.Parameter, Tensor]:
        """The gradients of those parameters that have one."""
        return {parameter: self._kept[parameter] for parameter in parameters if parameter in self._kept}

    def take(self, parameter: nn.Parameter) -> None:
        """Take over what `grad` has now, of one micro-batch.

        Raises:
            InputError: it is not dense.
        """
        gradient = parameter.grad
        assert gradient is not None, "accumulated"
        parameter.grad = None
        chunk = self._places[parameter].chunk
        if gradient.layout is not torch.strided:
            raise InputError(
                f"model parameter {self._names[parameter]}: expected a dense gradient, got {gradient.layout}"
            )
        is_first = self._layout.gradient(chunk) in self._arena.dead
        self._walker.enter(gradient_moment(self._layout, chunk, is_first=is_first))
        kept = self._kept.get(parameter)
        if kept is None:
            kept = self._keep(parameter, gradient)
        else:
            with torch.no_grad():
                kept.add_(gradient)  # as autograd accumulates
        if kept.numel():
            self.marks[self._names[parameter]] = torch.linalg.vector_norm(kept, math.inf)

    def show(self) -> None:
        """Have all gradients in `grad`, where they are, until `take_shown`."""
        self._arena.settle()
        for parameter, gradient in self._kept.items():
            parameter.grad = gradient
            chunk = self._layout.gradient(self._places[parameter].chunk)
            if chunk in self._arena.held:
                self._arena.use(chunk, writes=True)

    def take_shown(self) -> None:
        """Take the gradients that `grad` has now, other tensors and more of them maybe."""
        for parameter in self._places:
            shown, parameter.grad = parameter.grad, None
            if shown is None:
                continue
            kept = self._kept.get(parameter)
            if kept is None:
                self._keep(parameter, shown)
            elif kept.data_ptr() != shown.data_ptr():
                kept.copy_(shown)

    def hand_out(self, chunk: int, parameters: Iterable[nn.Parameter]) -> None:
        """Have copies of the gradients of a chunk's parameters in `grad`, beside the chunks, until `take_back`."""
        own = self.of(parameters)
        if own:
            self._walker.enter(gradient_moment(self._layout, chunk, is_first=False))
            for parameter, gradient in own.items():
                parameter.grad = gradient.clone()
            self._forget(chunk, own)

    def take_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take over what `grad` has of parameters whose chunk of gradients is used now."""
        for parameter in parameters:
            shown, parameter.grad = parameter.grad, None
            if shown is not None:
                self._keep(parameter, shown)

    def drop(self, chunk: int, parameters: Iterable[nn.Parameter]) -> None:
        """Nobody reads the gradients of a chunk's parameters again."""
        self._forget(chunk, [*self.of(parameters)])

    def clear(self) -> None:
        """Forget the gradients of a batch."""
        for parameter in self._places:
            parameter.grad = None
        self._kept.clear()
        self.marks.clear()
        for chunk in range(self._layout.num_of_kind):
            self._arena.drop(self._layout.gradient(chunk))

    def _forget(self, chunk: int, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            del self._kept[parameter]
        self._arena.drop(self._layout.gradient(chunk))

    def _keep(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        place = self._places[parameter]
        kept = gradient.detach()
        self._arena.place(kept, Part.of(kept, self._layout.gradient(place.chunk), place.offset_bytes))
        self._kept[parameter] = kept
        return kept
