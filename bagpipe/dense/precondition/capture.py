"""`LayerCapture`: inputs and output gradients of linear layers, between their computation and their sums.

    forward of a micro-batch ──hook──> inputs of each layer ─┐ COV_A adds them up, and drops them
    its backward ─────hook on outputs──> output gradients ───┘ COV_G likewise

The inputs are those that autograd keeps for the weight gradients; until COV_A they live on after the backward. A
forward without gradients, such as one that is computed again later, captures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from bagpipe.dense.precondition.factors import BatchSums
from bagpipe.dense.precondition.layers import LinearLayer

__all__ = ["LayerCapture"]


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One call of a layer.

    Attributes:
        layer: its number.
        inputs: its inputs; None: they were added up.
        gradients: the output gradients; None: the backward has not reached it.
    """

    layer: int
    inputs: Tensor | None
    gradients: Tensor | None = None

    def take(self, gradient: Tensor) -> None:
        """Keep the output gradient. The halves of a split backward can both pass it; the first one has all of it."""
        if self.gradients is None:
            self.gradients = gradient.detach()


@dataclass(slots=True, kw_only=True, eq=False)
class _Unit:
    """A micro-batch.

    Attributes:
        calls: in the order of the forward.
        has_inputs, has_outputs: these are not added up yet. The inputs can be before the backward.
    """

    calls: list[_Call] = field(default_factory=list)
    has_inputs: bool = True
    has_outputs: bool = True


class LayerCapture:
    """Captures the layers of one module. One thread uses it, between `open` and `close`.

    Args:
        layers: of the module; numbers are positions here.
        wanted: numbers of the layers that are captured.

    Attributes:
        sums: by batch, the sums of each captured layer by its number.
    """

    def __init__(self, layers: Sequence[LinearLayer], wanted: Sequence[int]) -> None:
        self.sums: dict[int, dict[int, BatchSums]] = {}
        self._layers = tuple(layers)
        self._wanted = tuple(wanted)
        self._handles: list[Any] = []
        self._units: dict[int, _Unit] = {}
        self._current: _Unit | None = None

    def open(self) -> None:
        """Begin to watch the layers."""
        self._handles = [
            self._layers[number].module.register_forward_hook(partial(self._called, number)) for number in self._wanted
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def during(self, index: int, forward: Callable[[], Any]) -> Any:
        """Call a forward of a micro-batch, and capture its layers."""
        self._current = self._units.setdefault(index, _Unit())
        try:
            return forward()
        finally:
            self._current = None

    def add_inputs(self, index: int, batch: int) -> None:
        """Add the inputs of a micro-batch to the sums of its batch."""
        unit = self._units.get(index)
        if unit is None:
            return
        for call in unit.calls:
            if call.inputs is not None:
                has_bias = self._layers[call.layer].bias is not None
                self._sums(batch, call.layer).add_inputs(call.inputs, has_bias=has_bias)
                call.inputs = None
        unit.has_inputs = False
        self._forget(index, unit)

    def add_outputs(self, index: int, batch: int, factor: float) -> None:
        """Add the output gradients of a micro-batch to the sums of its batch; see `BatchSums.add_outputs`."""
        unit = self._units.get(index)
        if unit is None:
            return
        counted: set[int] = set()
        for call in unit.calls:
            if call.gradients is not None:
                is_first = call.layer not in counted
                self._sums(batch, call.layer).add_outputs(call.gradients, factor, counts=is_first)
                counted.add(call.layer)
                call.gradients = None
        unit.has_outputs = False
        self._forget(index, unit)

    def num_examples(self) -> int:
        """Examples of all micro-batches whose output gradients are not added up: the most that a layer has seen."""
        return sum(
            max((len(call.gradients) for call in unit.calls if call.gradients is not None), default=0)
            for unit in self._units.values()
        )

    def drop(self, batch: int) -> None:
        """Forget the sums of a batch that is left out."""
        self.sums.pop(batch, None)

    def _sums(self, batch: int, number: int) -> BatchSums:
        own = self.sums.setdefault(batch, {})
        if number not in own:
            layer = self._layers[number]
            own[number] = BatchSums.zeros(layer.num_inputs, layer.num_outputs, layer.weight)
        return own[number]

    def _forget(self, index: int, unit: _Unit) -> None:
        if not unit.has_inputs and not unit.has_outputs:
            del self._units[index]

    def _called(self, number: int, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self._current is None or not output.requires_grad:
            return
        call = _Call(layer=number, inputs=arguments[0].detach())
        self._current.calls.append(call)
        output.register_hook(call.take)  # type: ignore[no-untyped-call]
