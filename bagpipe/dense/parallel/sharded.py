"""`ShardedModel`: a model whose optimizer state, gradients or parameters are divided among the ranks (ZeRO 1 to 3).

    level        a rank keeps                                         per step
    optimizer    its share of the state                               REDUCE_GRAD of every unit, gather after OPT
    gradients    … and of the gradients: freed as soon as they are sent                the same
    parameters   … and of the parameters: UNSHARD a unit before its forward and before its backward, RESHARD after

    forward:   gather 0 | F 0, gather 1 | F 1, gather 2 | …        backward:   gather n | B n, gather n-1 | B n-1, …
               free 0 when its forward is done, …                              sum and free n when its gradients are

All ranks gather the units in the order of the model's modules, and sum them in the reverse order, whatever their graphs
do; gathers and sums have a group each, so neither waits for the other. The sums are those of `UnitShard`: bits do not
depend on the level. Why not `torch.distributed.fsdp`: docs/decisions/0021.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.dense.parallel.broadcast import share_buffers, share_model
from bagpipe.dense.parallel.buckets import add_up, is_bad_anywhere
from bagpipe.dense.parallel.ordered_exchanges import OrderedExchanges, Ticket
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.dense.parallel.shard_units import ParameterUnit
from bagpipe.dense.parallel.unit_gathers import UnitGathers
from bagpipe.dense.parallel.unit_shard import UnitShard
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError, JobError
from bagpipe.types.model_inputs import device_of
from bagpipe.types.shard_level import ShardLevel

__all__ = ["ShardedModel"]


class ShardedModel:
    """Use as a context manager; entering broadcasts rank 0's parameters and buffers.

    A step is `passing` around forward and backward, `reduce`, the step of an optimizer of `segments`, and `gather`.
    A rank without examples makes the same calls. One backward per step.

    Args:
        model: the same parameters in the same order on every rank.
        units: of it (`find_units`).
        level: what is divided; not none.
        sums: group of the gradients.
        gathers: group of the parameters; another communicator of the same ranks.

    Attributes:
        level: as given.
        rank: of this process, among those that have shares.
        shards: of the units, in their order.
        segments: this rank's part of every trainable parameter, by name, in the model's order. An optimizer steps them.

    Raises:
        InputError: something keeps a view of a parameter; in forward or backward: a gradient is sparse, a parameter is
            used outside its unit's forward, or the forward changes a buffer.
        PeerError: a peer is gone or silent.
    """

    def __init__(
        self,
        model: nn.Module,
        units: tuple[ParameterUnit, ...],
        level: ShardLevel,
        *,
        sums: RankGroup,
        gathers: RankGroup,
    ) -> None:
        share_model(model, sums)
        self.level = level
        self.rank = sums.rank
        self.shards = tuple(UnitShard(unit, level=level, rank=sums.rank, num_ranks=sums.world_size) for unit in units)
        for shard in self.shards:
            shard.check_left()
        found = {n: s for shard in self.shards for n, s in zip(shard.names, shard.segments, strict=True)}
        self.segments: Mapping[str, nn.Parameter] = {n: found[n] for n, _ in model.named_parameters() if n in found}
        self._model = model
        self._sums = sums
        self._lane = OrderedExchanges(device_of(model), name="bagpipe-dense", limit=len(self.shards))
        self._gathers = UnitGathers(self.shards, gathers, device_of(model), frees=level == "parameters")
        self._missing = [len(shard.parameters) for shard in self.shards]
        self._tickets: list[Ticket] = []
        self._is_bad = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for number, shard in enumerate(self.shards):
                for position, parameter in enumerate(shard.parameters):
                    handle: Any = parameter.register_post_accumulate_grad_hook(self._hook(number, position))  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            stack.enter_context(self._lane)
            stack.enter_context(self._gathers)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    # ---- a step --------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a step, if this rank has examples or not."""
        before = [buffer._version for buffer in self._model.buffers()]
        with self._gathers.forward():
            yield
        for version, (name, buffer) in zip(before, self._model.named_buffers(), strict=True):
            if buffer._version != version:
                raise InputError(
                    f"dense.shard: the forward changes the buffer {name}, which would come to differ between the "
                    f"ranks: expected a model whose buffers stay the same"
                )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a step, if this rank has examples or not."""
        with self._gathers.backward():
            yield

    def reduce(self, *, is_bad: bool | None = None) -> bool:
        """Sum the gradients over the ranks; `segments` then have theirs. All ranks call it once per step.

        Args:
            is_bad: this rank's batch is not finite. None: bad batches are not skipped, so ranks do not exchange marks.

        Returns:
            Whether any rank's batch is bad; False if `is_bad` is None.
        """
        self._is_bad = bool(is_bad)
        while len(self._tickets) < len(self.shards):
            self._launch()
        for ticket in self._tickets:
            ticket.wait()
        self._tickets = []
        self._missing = [len(shard.parameters) for shard in self.shards]
        for shard in self.shards:
            shard.land()
        if is_bad is None:
            return False
        return self.shards[0].is_marked() if self.shards else is_bad_anywhere(self._sums, is_bad)

    def show(self, wanted: Container[str]) -> None:
        """Give parameters their whole gradients; see `UnitShard.show`. Between `reduce` and `gather`, by all ranks."""
        for shard in self.shards:
            shard.show(wanted, self._sums)

    def take_shown(self, wanted: Container[str]) -> None:
        """The segments take the gradients that parameters have now; see `UnitShard.take_shown`."""
        for shard in self.shards:
            shard.take_shown(wanted)

    def add_up(self, vector: Tensor) -> Tensor:
        """The sum of the ranks' vectors, in rank order; between `reduce` and `gather`. All ranks call it.

        Raises:
            PeerError: a peer is gone or silent.
        """
        total = torch.empty_like(vector)

        def exchange() -> None:
            total.copy_(add_up(self._sums, vector))

        self._lane.submit(exchange).wait()
        return total

    def whole_norms(self, squares: Tensor) -> Sequence[Tensor]:
        """Norms of whole gradients, scalars of their dtype; between `reduce` and `gather`, by all ranks.

        Args:
            squares: float64 ``[segments]``, of the norms of this rank's segments of them, in the order of `segments`.
        """
        dtype = next(iter(self.segments.values())).dtype
        return self.add_up(squares).sqrt().to(dtype).unbind()

    def gather(self) -> None:
        """After the optimizer's step: the model has the new parameters, unless they are divided."""
        if self.level != "parameters":
            self._gathers.gather_all()

    def clear(self) -> None:
        """Forget the gradients."""
        for shard in self.shards:
            shard.clear()

    def largest_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and largest magnitude (scalar) of each gradient of this rank's batch, after its backward."""
        for shard in self.shards:
            yield from shard.largest()

    # ---- between steps -------------------------------------------------------------------------------------------

    def gather_model(self) -> None:
        """The model has its whole parameters, for evaluation or at the end. All ranks call it, between steps."""
        if self.level == "parameters":
            self._gathers.gather_all()

    def release_model(self) -> None:
        """Training goes on from the model's parameters: each rank keeps its share."""
        for shard in self.shards:
            shard.adopt()
        if self.level == "parameters":
            self._gathers.release_all()

    def live_apart(self) -> None:
        """See `UnitShard.live_apart`. Before the first step."""
        for shard in self.shards:
            shard.live_apart()

    @property
    def is_whole(self) -> bool:
        """The model has its whole parameters."""
        return all(shard.is_here for shard in self.shards)

    def pieces(self) -> Mapping[str, Piece]:
        """Place and whole shape of each of this rank's segments in its parameter, by name."""
        return {name: piece for shard in self.shards for name, piece in shard.pieces().items()}

    def whole_states(self, optimizer: Optimizer) -> Iterator[object]:
        """The optimizer's state as one of the whole parameters has it, in its order. All ranks call it, between steps.

        Raises:
            PeerError: a peer is gone or silent.
        """
        places = {
            segment: (shard, position) for shard in self.shards for position, segment in enumerate(shard.segments)
        }
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for name in sorted(state):
                    if parameter in places and isinstance(state[name], Tensor) and state[name].ndim:
                        shard, position = places[parameter]
                        yield shard.joined(position, state[name], self._sums)
                    else:
                        yield state[name]

    def joined(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of the ranks' parts, between steps; see `StageShare.joined`.

        Raises:
            PeerError: a peer is gone or silent.
        """
        return {name: whole for shard in self.shards for name, whole in shard.join(parts, self._sums)}

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent so far."""
        return sum(shard.num_sent_bytes for shard in self.shards)

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers. All ranks call it, between steps."""
        share_buffers(self._model, self._sums)

    # ---- sums ----------------------------------------------------------------------------------------------------

    def _hook(self, number: int, position: int) -> Any:
        shard = self.shards[number]

        def ready(parameter: Tensor) -> None:
            if not self._missing[number]:
                raise JobError(f"model parameter {shard.names[position]}: expected one backward per step, got another")
            shard.take(position)
            self._missing[number] -= 1
            if not self._missing[number]:
                self._gathers.free(number)
            # The last one waits for `reduce`: a rank whose batch is bad never calls it, so no other rank steps.
            while len(self._tickets) < len(self.shards) - 1 and not self._missing[-1 - len(self._tickets)]:
                self._launch()

        return ready

    def _launch(self) -> None:
        """Start the next unit's sum: last unit first, in an order that is equal on all ranks."""
        shard = self.shards[-1 - len(self._tickets)]
        is_marked = self._is_bad
        self._tickets.append(self._lane.submit(lambda: shard.exchange(self._sums, is_marked=is_marked)))
