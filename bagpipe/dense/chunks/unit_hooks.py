"""`UnitHooks`: calls of modules and what autograd saves, as moments of their chunks.

forward of a unit    hook before it: its chunks come            what autograd saves of them: a place, not memory
backward             a saved place is read: the unit's chunks come
`versions`           other weights than the parameters in forward or backward: their chunks come in the same way
any function         is given a parameter whose unit is not in its forward: refused, it may not be on the device
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from bagpipe.dense.chunks.arena import Part
from bagpipe.dense.chunks.layout import ChunkLayout, Place
from bagpipe.dense.chunks.moments import Moment
from bagpipe.dense.chunks.units import Unit, is_compiled, module_moment, tensors_in
from bagpipe.dense.chunks.walker import Walker
from bagpipe.dense.versioned_call import in_place_of
from bagpipe.errors import InputError

__all__ = ["UnitHooks"]

#: Functions that read no element: names of methods, and of attributes.
_WITHOUT_ELEMENTS = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "__len__", "type", "get_device", "__hash__", "__repr__", "storage_offset", "untyped_storage",
    "requires_grad_", "__set__",
})  # fmt: skip
_WITH_ELEMENTS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A part of a parameter that autograd has saved for a backward."""

    part: Part
    moment: Moment
    hooks: UnitHooks

    def get(self) -> Tensor:
        """The tensor, on the device."""
        return self.hooks.unpack(self)


class UnitHooks:
    """See above. The hooks stay on the modules.

    Args:
        walker: gives moments their chunks.
        units: whose forwards are called in training.
        outer: whose forwards are called in evaluations only.
        names: of each parameter.
        layout: of all chunks.
        places: of each parameter.
        kept: name of what else is kept of parameters -> parameter -> tensor, in a chunk of that name. Read when used.
    """

    def __init__(
        self,
        walker: Walker,
        units: Sequence[Unit],
        outer: Sequence[Unit],
        names: Mapping[nn.Parameter, str],
        *,
        layout: ChunkLayout,
        places: Mapping[nn.Parameter, Place],
        kept: Mapping[str, Mapping[nn.Parameter, Tensor]],
    ) -> None:
        self._layout = layout
        self._kept = kept
        self._forward = self._backward = ""  # names of the weights in use; empty: the parameters
        self._replaced: list[list[tuple[nn.Module, str, nn.Parameter | None]]] = []  # by open unit, what it had before
        self._walker = walker
        self._arena = walker.arena
        self._names = names
        self._unit = {parameter: unit for unit in units for parameter in unit.parameters}
        self._frozen = frozenset(place.chunk for parameter, place in places.items() if not parameter.requires_grad)
        self._opened: list[Unit] = []
        self._called: set[Unit] = set()  # in this batch
        self._is_batch = self._is_computing = False
        self._moments: dict[tuple[object, ...], Moment] = {}
        # A compiled unit has all uses of its parameters inside, and the mode would be compiled too.
        self._mode = None if any(is_compiled(unit.module) for unit in units) else _UsesInside(self)
        for unit in (*units, *outer):
            unit.module.register_forward_pre_hook(self._opening(unit))
            unit.module.register_forward_hook(self._closing(unit), always_call=True)

    def begin(self, *, goes_on: bool = False) -> None:
        """A batch begins.

        Args:
            goes_on: some of its forwards were called before.
        """
        self._opened.clear()
        self._replaced.clear()
        if not goes_on:
            self._called.clear()
        self._is_batch = True

    def finish(self) -> None:
        """No batch is under way."""
        self._opened.clear()
        self._is_batch = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside is a forward of a batch that has a backward."""
        self._is_computing = True
        try:
            with saved_tensors_hooks(self.pack, self.unpack), self._mode or nullcontext():
                yield
        finally:
            self._is_computing = False

    @contextmanager
    def versions(self, forward: str, backward: str) -> Iterator[None]:
        """Inside, a forward has other weights than the parameters, or will have them in its backward.

        Args:
            forward, backward: names of the weights; empty: the parameters.
        """
        self._forward, self._backward = forward, backward
        try:
            yield
        finally:
            self._forward = self._backward = ""

    def check_called(self, parameter: nn.Parameter) -> None:
        """Check that the forward of the parameter's unit was called in this batch, as it has a gradient.

        Raises:
            InputError: it was not.
        """
        if self._unit[parameter] not in self._called:
            raise self._outside(parameter)

    def check_use(self, values: Iterable[Any]) -> None:
        """Check that those arguments of a function that are parameters have their unit in its forward.

        Raises:
            InputError: one has not.
        """
        for value in values:
            if isinstance(value, nn.Parameter):
                unit = self._unit.get(value)
                if unit is not None and unit not in self._opened:
                    raise self._outside(value)
            elif isinstance(value, list | tuple):
                self.check_use(value)

    def _opening(self, unit: Unit) -> Callable[..., None]:
        def opening(module: nn.Module, inputs: Any) -> None:
            if torch.compiler.is_dynamo_compiling() or module is not unit.module:
                # Inside a compiled unit, or in a copy whose parameters are in no chunk. `is_compiling` would be true in
                # the lanes beside one that compiles, too.
                return
            self._opened.append(unit)
            if self._is_batch and not self._is_computing and torch.is_grad_enabled():
                raise InputError(
                    f"dense.budget_bytes is not possible for this model: the forward of {_title(unit)} runs again in "
                    "the backward (activation checkpointing), expected once"
                )
            self._called.add(unit)
            with torch._C.DisableTorchFunction():
                self._walker.enter(self._moment("forward"))
                self._replaced.append([*self._replace(unit)] if self._forward else [])

        return opening

    def _replace(self, unit: Unit) -> Iterator[tuple[nn.Module, str, nn.Parameter | None]]:
        """Have the unit's modules use other weights, which are on the device; gives what they had."""
        kept, own = self._kept[self._forward], frozenset(unit.parameters)
        for module in unit.module.modules():
            for key, parameter in module._parameters.items():
                if parameter in own and parameter in kept:
                    yield module, key, parameter
                    module._parameters[key] = in_place_of(parameter, kept[parameter])  # type: ignore[assignment]

    def _closing(self, unit: Unit) -> Callable[..., None]:
        def closing(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if torch.compiler.is_dynamo_compiling() or module is not unit.module:
                return
            self._opened.pop()
            for owner, key, parameter in self._replaced.pop() if self._replaced else ():
                owner._parameters[key] = parameter
            with torch._C.DisableTorchFunction():
                if not all(self._stays(tensor) for tensor in tensors_in(outputs)):
                    raise InputError(
                        f"dense.budget_bytes is not possible for this model: {_title(unit)} returns a part of its "
                        "parameters, which does not stay on the device: expected a copy"
                    )

        return closing

    def _stays(self, tensor: Tensor) -> bool:
        """A tensor lies outside of chunks, or in one that the modules around need too."""
        try:
            found = self._arena.find(tensor)
        except LookupError:
            return False
        return found is None or self._is_open(found[0])

    def _is_open(self, chunk: int) -> bool:
        """The weights of a chunk are those of a unit in its forward."""
        own = self._layout.parameters(chunk)
        return any(own in unit.chunks for unit in self._opened)

    def _placed(self, version: str, chunk: int) -> int:
        """The chunk with the weights of that name in place of a chunk of parameters."""
        return chunk if not version or chunk in self._frozen else self._layout.state(chunk, version)

    def _moment(self, kind: str) -> Moment:
        version = self._forward if kind == "forward" else self._backward
        key = (kind, version, *self._opened)
        moment = self._moments.get(key)
        if moment is None:
            moment = self._moments[key] = module_moment(kind, self._opened, partial(self._placed, version))
        return moment

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """What autograd saves of a tensor in a forward: of one in a chunk its place."""
        with torch._C.DisableTorchFunction():
            try:
                found = self._arena.find(tensor)
            except LookupError:
                raise self._outside(tensor) from None
            if found is None:
                return tensor
            chunk, offset_bytes = found
            if not self._is_open(chunk):
                raise self._outside(tensor)
            placed = self._placed(self._backward, self._layout.parameters(chunk))
            return _Saved(Part.of(tensor, placed, offset_bytes), self._moment("backward"), self)

    def place(self, tensor: Tensor) -> _Saved | None:
        """The place of a tensor in a chunk; None: it is in none."""
        packed = self.pack(tensor)
        return packed if isinstance(packed, _Saved) else None

    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """The tensor of what `pack` gave, on the device."""
        if isinstance(saved, Tensor):
            return saved
        if self._walker.current is not saved.moment:
            self._walker.enter(saved.moment)
        return self._arena.view(saved.part)

    def _outside(self, tensor: Tensor) -> InputError:
        with torch._C.DisableTorchFunction():
            place = tensor.data_ptr()
            name = next((name for parameter, name in self._names.items() if parameter.data_ptr() == place), "")
        return InputError(
            f"dense.budget_bytes is not possible for this model: {name or 'a parameter'} is used outside of the "
            "forward of its module"
        )


class _UsesInside(TorchFunctionMode):
    """Sees every function that is called, with its arguments."""

    def __init__(self, hooks: UnitHooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _reads_no_element(func):
            self._hooks.check_use(args)
            if kwargs:
                self._hooks.check_use(kwargs.values())
        return func(*args, **(kwargs or {}))


def _reads_no_element(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _WITH_ELEMENTS
    return name in _WITHOUT_ELEMENTS


def _title(unit: Unit) -> str:
    return f"module {unit.name}" if unit.name else "the model"
