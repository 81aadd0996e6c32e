"""`ChunkedModel`: a model and its optimizer whose parameters, gradients and state live in chunks.

    forward of a unit    hook before it: its chunks come            what autograd saves of them: a place, not memory
    backward             a saved place is read: the unit's chunks come
    gradient is ready    hook: its chunk comes, the gradient is copied there
    step, chunk by chunk its parameters, gradients and state come; the optimizer sees these parameters alone

Parameters and state keep their identity and their names: whoever reads them by name finds them where they are, after
`settle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from bagpipe.dense.chunks.arena import Arena, Part
from bagpipe.dense.chunks.layout import pack
from bagpipe.dense.chunks.moments import Moment
from bagpipe.dense.chunks.state import state_names
from bagpipe.dense.chunks.units import (
    Unit,
    check_slots,
    gradient_moment,
    module_moment,
    step_moment,
    tensors_in,
    units_of,
)
from bagpipe.dense.chunks.walker import Walker
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import Streams
from bagpipe.types.model_inputs import device_of

__all__ = ["Budget", "ChunkedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much of the dense part the device holds.

    Attributes:
        num_bytes: of chunks on the device at most; 0: no limit.
        chunk_bytes: size of a chunk; 0: the bytes of the largest parameter.
        state_on_host: the device has room for parameters, gradients and two steps' state: state streams through.
    """

    num_bytes: int = 0
    chunk_bytes: int = 0
    state_on_host: bool = False


@dataclass(frozen=True, slots=True)
class _Saved:
    """A part of a parameter that autograd has saved for a backward."""

    part: Part
    moment: Moment


class ChunkedModel:
    """See above. One thread at a time uses it.

    Args:
        model: its parameters are dense and contiguous.
        optimizer: of its parameters; its state by element goes into chunks.
        budget: of the device.
        streams: of the model's device.

    Attributes:
        marks: by name of the parameters with a gradient in this batch: its largest magnitude, a scalar that is finite
            if all its elements are.

    Raises:
        InputError: the optimizer's state is not by element, two modules share a parameter, or the budget is too small.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, budget: Budget, streams: Streams) -> None:
        named = dict(model.named_parameters())
        states = state_names(optimizer)
        if budget.state_on_host and not states:
            kind = type(optimizer).__name__
            raise InputError(f"dense.state host needs an optimizer that keeps state by element, got {kind} without any")
        self._optimizer = optimizer
        self._layout = layout = pack(
            [*named], [parameter.nbytes for parameter in named.values()], chunk_bytes=budget.chunk_bytes, states=states
        )
        self._place = dict(zip(named.values(), layout.places, strict=True))
        self._name = {parameter: name for name, parameter in named.items()}
        self._units = units_of(model, {parameter: place.chunk for parameter, place in self._place.items()})
        limits = [budget.num_bytes] if budget.num_bytes else []
        if budget.state_on_host:
            # Two steps' state: one is copied while the other is used.
            limits.append(2 * (layout.num_of_kind + len(states)) * layout.chunk_bytes)
        num_bytes = min([*limits, layout.num_bytes])
        if limits:
            check_slots(layout, self._units, min(limits))
        self.arena = Arena(
            layout.num_chunks,
            layout.chunk_bytes,
            num_bytes // layout.chunk_bytes,
            device=device_of(model),
            streams=streams,
        )
        self.arena.dead.update(range(layout.num_of_kind, layout.num_chunks))
        self.walker = Walker(self.arena, f"dense.budget_bytes {num_bytes}")
        self.marks: dict[str, Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._unit = {parameter: unit for unit in self._units for parameter in unit.parameters}
        self._opened: list[Unit] = []
        self._called: set[Unit] = set()  # in this batch
        self._is_batch = self._is_computing = False
        self._moments: dict[tuple[str, ...], Moment] = {}
        self._of_chunk: list[list[nn.Parameter]] = [[] for _ in range(layout.num_of_kind)]
        for parameter, place in self._place.items():
            self._of_chunk[place.chunk].append(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)  # type: ignore[no-untyped-call]
        for unit in self._units:
            unit.module.register_forward_pre_hook(self._opening(unit))
            unit.module.register_forward_hook(self._closing(unit), always_call=True)
        self.start()

    def start(self) -> None:
        """Everything is home, and the state that the optimizer has now lies in chunks. Before a run."""
        self.walker.rest()
        self.drop_gradients()
        self._opened.clear()
        self._is_batch = False
        for chunk in range(self._layout.num_chunks):
            self.arena.release(chunk)
        for parameter, place in self._place.items():
            self.arena.place(parameter, Part.of(parameter, place.chunk, place.offset_bytes))
            self._place_state(parameter)

    def end(self) -> None:
        """Everything goes home; the copy lane ends. After a run."""
        self.walker.rest()
        self.arena.close()

    def settle(self) -> None:
        """All parameters and state can be read and written where they are."""
        self.arena.settle()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside is the forward of a batch that has a backward."""
        self._is_computing = True
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._is_computing = False

    def begin(self) -> None:
        """A batch begins."""
        self.drop_gradients()
        self._called.clear()
        self._is_batch = True
        self.walker.begin()

    def step(self, update: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Step chunk by chunk.

        Args:
            update: steps the optimizer, which sees only the parameters of its argument, with their gradients.
        """
        for chunk, parameters in enumerate(self._of_chunk):
            own = [parameter for parameter in parameters if parameter in self._gradients]
            if not own:
                continue
            self.walker.enter(step_moment(self._layout, chunk))
            for parameter in own:
                parameter.grad = self._gradients[parameter]
            with self._only(own):
                update(own)
            for parameter in own:
                parameter.grad = None
                self._place_state(parameter)
            self.arena.drop(self._layout.gradient(chunk))

    def finish(self) -> None:
        """A batch is over."""
        self._is_batch = False
        self.drop_gradients()
        self.walker.end()

    def drop_gradients(self) -> None:
        """Forget the gradients of a batch."""
        for parameter in self._gradients:
            parameter.grad = None
        self._gradients.clear()
        self.marks.clear()
        for chunk in range(self._layout.num_of_kind):
            self.arena.drop(self._layout.gradient(chunk))

    def show_gradients(self) -> None:
        """Have all gradients in `grad`, where they are, until `take_shown`."""
        self.arena.settle()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
            chunk = self._layout.gradient(self._place[parameter].chunk)
            if chunk in self.arena.held:
                self.arena.use(chunk, writes=True)

    def take_shown(self) -> None:
        """Take the gradients that `grad` has now, other tensors and more of them maybe."""
        for parameter in self._place:
            shown, parameter.grad = parameter.grad, None
            if shown is None:
                continue
            kept = self._gradients.get(parameter)
            if kept is None:
                self._keep(parameter, shown)
            elif kept.data_ptr() != shown.data_ptr():
                kept.copy_(shown)

    def _opening(self, unit: Unit) -> Callable[..., None]:
        def opening(module: nn.Module, inputs: Any) -> None:
            self._opened.append(unit)
            if self._is_batch and not self._is_computing and torch.is_grad_enabled():
                raise InputError(
                    f"dense.budget_bytes is not possible for this model: the forward of {_title(unit)} runs again in "
                    "the backward (activation checkpointing), expected once"
                )
            self._called.add(unit)
            self.walker.enter(self._moment("forward"))

        return opening

    def _closing(self, unit: Unit) -> Callable[..., None]:
        def closing(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._opened.pop()
            for tensor in tensors_in(outputs):
                if not self._stays(tensor):
                    raise InputError(
                        f"dense.budget_bytes is not possible for this model: {_title(unit)} returns a part of its "
                        "parameters, which does not stay on the device: expected a copy"
                    )

        return closing

    def _stays(self, tensor: Tensor) -> bool:
        """A tensor lies outside of chunks, or in one that the modules around need too."""
        try:
            found = self.arena.find(tensor)
        except LookupError:
            return False
        return found is None or any(found[0] in unit.chunks for unit in self._opened)

    def _moment(self, kind: str) -> Moment:
        key = (kind, *(unit.name for unit in self._opened))
        moment = self._moments.get(key)
        if moment is None:
            moment = self._moments[key] = module_moment(kind, self._opened)
        return moment

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        try:
            found = self.arena.find(tensor)
        except LookupError:
            raise self._outside(tensor) from None
        if found is None:
            return tensor
        chunk, offset_bytes = found
        if not any(chunk in unit.chunks for unit in self._opened):
            raise self._outside(tensor)
        return _Saved(Part.of(tensor, chunk, offset_bytes), self._moment("backward"))

    def _outside(self, tensor: Tensor) -> InputError:
        name = next((name for parameter, name in self._name.items() if parameter.data_ptr() == tensor.data_ptr()), "")
        return InputError(
            f"dense.budget_bytes is not possible for this model: {name or 'a parameter'} is used outside of the "
            "forward of its module"
        )

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.walker.current is not saved.moment:
            self.walker.enter(saved.moment)
        return self.arena.view(saved.part)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None, "accumulated"
        parameter.grad = None
        place = self._place[parameter]
        if gradient.layout is not torch.strided:
            raise InputError(
                f"model parameter {self._name[parameter]}: expected a dense gradient, got {gradient.layout}"
            )
        if self._unit[parameter] not in self._called:
            raise self._outside(parameter)
        is_first = self._layout.gradient(place.chunk) in self.arena.dead
        self.walker.enter(gradient_moment(self._layout, place.chunk, is_first=is_first))
        kept = self._gradients.get(parameter)
        if kept is None:
            kept = self._keep(parameter, gradient)
        else:
            with torch.no_grad():
                kept.add_(gradient)  # as autograd accumulates
        if kept.numel():
            self.marks[self._name[parameter]] = torch.linalg.vector_norm(kept, math.inf)

    def _keep(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        place = self._place[parameter]
        kept = gradient.detach()
        self.arena.place(kept, Part.of(kept, self._layout.gradient(place.chunk), place.offset_bytes))
        self._gradients[parameter] = kept
        return kept

    def _place_state(self, parameter: nn.Parameter) -> None:
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        place = self._place[parameter]
        for name in self._layout.states:
            tensor = state.get(name)
            if not isinstance(tensor, Tensor):
                continue
            if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                raise InputError(
                    f"chunks of the dense part need optimizer state of its parameters' shape and dtype, got "
                    f"{name} of {self._name[parameter]}: {tensor.dtype} {list(tensor.shape)}"
                )
            self.arena.place(tensor, Part.of(tensor, self._layout.state(place.chunk, name), place.offset_bytes))

    @contextmanager
    def _only(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, the optimizer has these parameters alone."""
        groups = self._optimizer.param_groups
        before, wanted = [group["params"] for group in groups], set(parameters)
        for group, everything in zip(groups, before, strict=True):
            group["params"] = [parameter for parameter in everything if parameter in wanted]
        try:
            yield
        finally:
            for group, everything in zip(groups, before, strict=True):
                group["params"] = everything


def _title(unit: Unit) -> str:
    return f"module {unit.name}" if unit.name else "the model"
