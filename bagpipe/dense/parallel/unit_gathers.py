"""`UnitGathers`: the whole parameters of units, gathered before they are used and freed after.

    forward of unit u:    wait for its gather; start that of u + 1; free u after its last call of the forward
    backward of unit u:   wait for its gather; start that of u - 1; free u when its gradients are complete

The first forward records how often each unit is called; until then nothing is freed before its end. A rank's gathers
depend on nothing but the number of the step: those that its graph did not ask for are made at the end of a pass.

In a pass the parameters of a unit are closed (`closed_parameter`) except in its own forward. What autograd saves of
them is its place (`saved_places`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from bagpipe.dense.parallel.closed_parameter import OUTSIDE, tensors_in
from bagpipe.dense.parallel.ordered_exchanges import OrderedExchanges, Ticket
from bagpipe.dense.parallel.saved_places import SavedPlaces
from bagpipe.dense.parallel.unit_shard import UnitShard
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["UnitGathers"]


class UnitGathers:
    """Use as a context manager.

    Args:
        shards: of the units, in the order of the gathers.
        group: of the ranks that have shares.
        device: of the parameters.
        frees: parameters are freed between uses; otherwise the passes do nothing.

    Raises:
        InputError: in a pass: a unit is called more often than in the first one, a parameter is used outside the
            forward of its unit, or a view of one is kept.
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
        self._places = SavedPlaces()
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
        for shard in self._shards:
            shard.open()

    def release_all(self) -> None:
        """Let go of every unit's parameters, between two passes.

        Raises:
            InputError: a view of one is kept.
        """
        for shard in self._shards:
            self._places.release(shard)
        for shard in self._shards:
            shard.check_left()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a step, of a rank without examples too."""
        if not self._frees:
            yield
            return
        self._count = [0] * len(self._shards)
        self._open.clear()
        self._begin(range(len(self._shards)))
        with self._places.saving():
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
            self._places.release(self._shards[number])

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
            shard.open()

        return enter

    def _after(self, number: int) -> Any:
        def leave(module: object, inputs: object, output: object) -> None:
            if not self._order or not torch.is_grad_enabled():
                return
            shard = self._shards[number]
            if shard in self._open:
                self._open.remove(shard)
            if shard not in self._open:
                shard.close()
            if any(shard.has(tensor) for tensor in tensors_in(output)):
                raise InputError(OUTSIDE)
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for tensor in outputs:
                tensor.register_hook(lambda gradient: self._enter(number))  # type: ignore[no-untyped-call]
            if not outputs:
                self._held.add(number)
            self._count[number] += 1
            if self._calls and self._count[number] == self._calls[number] and number not in self._held:
                self._places.release(shard)

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
            self._places.release(self._shards[number])
        for position in range(self._waited, len(self._order)):
            self._need(position)
            if self._order[position] not in self._held:
                self._places.release(self._shards[self._order[position]])
        for shard in self._shards:
            shard.check_left()
        self._order = ()

    def _need(self, position: int) -> None:
        """Wait for the gathers of a pass up to a position."""
        while self._waited <= position:
            if len(self._tickets) == self._waited:
                self._launch()
            self._tickets[self._waited].wait()
            self._places.arrive(self._shards[self._order[self._waited]])
            self._waited += 1

    def _launch(self) -> None:
        shard = self._shards[self._order[len(self._tickets)]]
        shard.allocate()
        self._tickets.append(self._lane.submit(lambda: shard.gather(self._group)))
