"""`LayerCapture`: inputs and output gradients of linear layers, between their computation and their sums.

    forward of a micro-batch ──hook──> inputs of each layer ─┐ COV_A adds them up, and drops them
    its backward ─────hook on outputs──> output gradients ───┘ COV_G likewise

The inputs are those that the layer is called with; until COV_A they live on, also after the backward. A forward without
gradients, such as one that is computed again later, captures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

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
        gradients: the output gradients; None: no backward has reached it, or they were added up.
        is_reached: a backward has reached it.
        adds: gradients of several backwards are added up. Otherwise the first one counts: the halves of a split
            backward can both pass it, and each has all of it.
    """

    layer: int
    inputs: Tensor | None
    adds: bool
    gradients: Tensor | None = None
    is_reached: bool = False

    def take(self, gradient: Tensor) -> None:
        """Keep the output gradient of a backward."""
        if not self.is_reached:
            self.gradients, self.is_reached = gradient.detach(), True
        elif self.adds and self.gradients is not None:
            self.gradients = self.gradients + gradient.detach()


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
    """Captures the layers of one module. One thread uses it, between `open` and `close`. Copies of the module are not
    captured.

    Args:
        layers: of the module; numbers are positions here.
        wanted: numbers of the layers that are captured.
        adds: a forward can have several backwards, whose gradients are added up.

    Attributes:
        sums: by batch, the sums of each captured layer by its number.
    """

    def __init__(self, layers: Sequence[LinearLayer], wanted: Sequence[int], *, adds: bool = False) -> None:
        self.sums: dict[int, dict[int, BatchSums]] = {}
        self._layers = tuple(layers)
        self._wanted = tuple(wanted)
        self._adds = adds
        self._handles: list[Any] = []
        self._units: dict[int, _Unit] = {}
        self._current: _Unit | None = None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # hooks of a copied module come here, and are told apart

    def open(self) -> None:
        """Begin to watch the layers."""
        self._handles = [
            self._layers[number].module.register_forward_hook(partial(self._called, number), with_kwargs=True)
            for number in self._wanted
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, index: int) -> None:
        """The forward of a micro-batch begins."""
        self._current = self._units.setdefault(index, _Unit())

    def end(self) -> None:
        """The forward is over."""
        self._current = None

    def during(self, index: int, forward: Callable[[], Any]) -> Any:
        """Call a forward of a micro-batch, and capture its layers."""
        self.begin(index)
        try:
            return forward()
        finally:
            self.end()

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

    def add_outputs(self, index: int, batch: int, *, factor: float, num_examples: int) -> None:
        """Add the output gradients of a micro-batch to the sums of its batch.

        Args:
            index: of the micro-batch.
            batch: its batch.
            factor: see `BatchSums.add_outputs`.
            num_examples: of the micro-batch.
        """
        unit = self._units.get(index)
        if unit is None:
            return
        counted: set[int] = set()
        for call in unit.calls:
            if call.gradients is not None:
                sums = self._sums(batch, call.layer)
                sums.add_outputs(call.gradients, factor)
                sums.counts[1] += num_examples * (call.layer not in counted)
                counted.add(call.layer)
                call.gradients = None
        unit.has_outputs = False
        self._forget(index, unit)

    def num_examples(self) -> Mapping[int, int]:
        """Examples by micro-batch whose gradients are not added up: the fewest rows that one of its layers has.

        Layers on folded places have more rows than examples. Calls that no backward has reached are forgotten.
        """
        found: dict[int, int] = {}
        for index, unit in self._units.items():
            unit.calls = [call for call in unit.calls if call.is_reached]
            found[index] = min((len(call.gradients) for call in unit.calls if call.gradients is not None), default=0)
        return found

    def drop(self, batch: int) -> None:
        """Forget the sums of a batch that is left out."""
        self.sums.pop(batch, None)

    def clear(self) -> None:
        """Forget everything that was captured."""
        self._units, self.sums, self._current = {}, {}, None

    def _sums(self, batch: int, number: int) -> BatchSums:
        own = self.sums.setdefault(batch, {})
        if number not in own:
            layer = self._layers[number]
            own[number] = BatchSums.zeros(layer.num_inputs, layer.num_outputs, layer.weight)
        return own[number]

    def _forget(self, index: int, unit: _Unit) -> None:
        if not unit.has_inputs and not unit.has_outputs:
            del self._units[index]

    def _called(
        self, number: int, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> None:
        is_own = module is self._layers[number].module
        if self._current is None or not is_own or not output.requires_grad:
            return
        inputs = arguments[0] if arguments else named["input"]
        call = _Call(layer=number, inputs=inputs.detach(), adds=self._adds)
        self._current.calls.append(call)
        output.register_hook(call.take)  # type: ignore[no-untyped-call]
