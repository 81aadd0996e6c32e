"""`UnitGathers`: the whole parameters of units, gathered before they are used and freed after.

    forward of unit u:    wait for its gather; start that of u + 1; free u after its last call of the forward
    backward of unit u:   wait for its gather; start that of u - 1; free u when its gradients are complete

The first forward records how often each unit is called; until then nothing is freed before its end. A rank's gathers
depend on nothing but the number of the step: those that its graph did not ask for are made at the end of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bagpipe.dense.parallel.ordered_exchanges import OrderedExchanges, Ticket
from bagpipe.dense.parallel.unit_shard import UnitShard
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["OUTSIDE", "UnitGathers"]


#: Where a parameter that is not here is used; some operators end the process if they meet one.
OUTSIDE = (
    "dense.shard parameters: a parameter is used outside the forward of its layer: name in dense.wrap a module whose "
    "forward has all of its uses"
)

#: Functions that read no values of a parameter: attributes, shapes, dtypes, tensors like it.
_WITHOUT_VALUES = frozenset(
    [
        "__get__",
        "__set__",
        "__hash__",
        "__len__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "type_as",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "is_contiguous",
        "register_hook",
        "to",
        "requires_grad_",
        "retain_grad",
        "data_ptr",
        "untyped_storage",
        "storage_offset",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
    ]
)


class UnitGathers:
    """Use as a context manager.

    Args:
        shards: of the units, in the order of the gathers.
        group: of the ranks that have shares.
        device: of the parameters.
        frees: parameters are freed between uses; otherwise the passes do nothing.

    Raises:
        InputError: in a forward: a unit is called more often than in the first one.
        PeerError: in a pass: a peer is gone or silent.
    """

    def __init__(self, shards: Sequence[UnitShard], group: RankGroup, device: torch.device, *, frees: bool) -> None:
        self._shards = tuple(shards)
        self._group = group
        self._frees = frees
        self._lane = OrderedExchanges(device, name="bagpipe-gather", limit=2 * len(self._shards))
        self._order: tuple[int, ...] = ()  # of the pass under way; empty between passes
        self._tickets: list[Ticket] = []
        self._waited = 0
        self._calls: list[int] = []  # of each unit in a forward; empty until the first one
        self._count: list[int] = []  # in the forward under way
        self._held: set[int] = set()  # units whose backward does not announce itself: they stay until its end
        self._open: list[UnitShard] = []  # whose forwards are under way, the innermost last
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._frees:
                for number, shard in enumerate(self._shards):
                    stack.callback(shard.module.register_forward_pre_hook(self._before(number)).remove)
                    stack.callback(shard.module.register_forward_hook(self._after(number)).remove)
            stack.enter_context(self._lane)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def gather_all(self) -> None:
        """Gather every unit. All ranks call it, between two passes.

        Raises:
            PeerError: a peer is gone or silent.
        """
        self._begin(range(len(self._shards)))
        self._need(len(self._shards) - 1)
        self._order = ()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a step, of a rank without examples too."""
        if not self._frees:
            yield
            return
        self._count = [0] * len(self._shards)
        self._open.clear()
        self._begin(range(len(self._shards)))
        with nullcontext() if self._calls else _OutsideUses(self._shards, self._open):
            yield
        self._end()
        if any(self._count) and not self._calls:
            self._calls = self._count

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a step, of a rank without examples too."""
        if not self._frees:
            yield
            return
        self._begin(range(len(self._shards) - 1, -1, -1))
        yield
        self._held.clear()
        self._end()

    def free(self, number: int) -> None:
        """The backward of a unit is done."""
        if self._order and self._frees and number not in self._held:
            self._shards[number].release()

    def _before(self, number: int) -> Any:
        def enter(*_: object) -> None:
            if not self._order or not torch.is_grad_enabled():
                return
            shard = self._shards[number]
            self._open.append(shard)
            self._enter(number)
            if not shard.is_here:
                raise InputError(
                    f"dense.shard parameters: layer {shard.name} is called {self._calls[number]} times in the first "
                    f"batch and more often in this one: name in dense.wrap a module whose forward makes all its calls"
                )

        return enter

    def _after(self, number: int) -> Any:
        def leave(module: object, inputs: object, output: object) -> None:
            if not self._order or not torch.is_grad_enabled():
                return
            if self._shards[number] in self._open:
                self._open.remove(self._shards[number])
            if any(self._shards[number].has(tensor) for tensor in _tensors(output)):
                raise InputError(OUTSIDE)
            outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            for tensor in outputs:
                tensor.register_hook(lambda gradient: self._enter(number))  # type: ignore[no-untyped-call]
            if not outputs:
                self._held.add(number)
            self._count[number] += 1
            if self._calls and self._count[number] == self._calls[number] and number not in self._held:
                self._shards[number].release()

        return leave

    def _enter(self, number: int) -> None:
        """A unit is about to be used: it is here, and the next one is on its way."""
        if not self._order:
            return
        position = self._order.index(number)
        self._need(position)
        if len(self._tickets) == position + 1 < len(self._order):
            self._launch()

    def _begin(self, order: Iterable[int]) -> None:
        self._order, self._tickets, self._waited = tuple(order), [], 0
        if self._order:
            self._launch()

    def _end(self) -> None:
        """Make the gathers that nothing has asked for, so that all ranks make the same, and free what is left."""
        for number in set(self._order[: self._waited]) - self._held:
            self._shards[number].release()
        for position in range(self._waited, len(self._order)):
            self._need(position)
            if self._order[position] not in self._held:
                self._shards[self._order[position]].release()
        self._order = ()

    def _need(self, position: int) -> None:
        """Wait for the gathers of a pass up to a position."""
        while self._waited <= position:
            if len(self._tickets) == self._waited:
                self._launch()
            self._tickets[self._waited].wait()
            self._shards[self._order[self._waited]].is_here = True
            self._waited += 1

    def _launch(self) -> None:
        shard = self._shards[self._order[len(self._tickets)]]
        shard.allocate()
        self._tickets.append(self._lane.submit(lambda: shard.gather(self._group)))


class _OutsideUses(TorchFunctionMode):
    """Refuses functions of parameters whose units' forwards are not under way. For one forward: it costs time."""

    def __init__(self, shards: Iterable[UnitShard], opened: Sequence[UnitShard]) -> None:
        super().__init__()
        self._owners = {id(parameter): shard for shard in shards for parameter in shard.parameters}
        self._opened = opened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _WITHOUT_VALUES and torch.is_grad_enabled():
            for tensor in (*_tensors(args), *_tensors(kwargs)):
                owner = self._owners.get(id(tensor))
                if owner is not None and owner not in self._opened:
                    raise InputError(OUTSIDE)
        return func(*args, **kwargs)


def _tensors(value: object) -> Iterator[Tensor]:
    """Tensors in a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
