"""`StageShards`: pipeline stages whose state, gradients or parameters are divided among the ranks that hold them.

    REDUCE_GRAD of stage s   gradients of its micro-batches, summed on this rank ─> each holder its share of the sums
    OPT                      this rank's segments
    UNSHARD                  each holder's new parameters ─> all holders; level parameters: before a run of computations
    RESHARD                  level parameters: behind them

Units are layers, as of a model without stages; a layer that two stages use is two units. The sums are those of
`UnitShard`, in the order of the ranks, which is that of `StageSums`: bits do not depend on the level. A stage that one
rank holds is not divided. Below level parameters each rank keeps its stages' whole parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.buckets import add_up
from bagpipe.dense.parallel.saved_places import SavedPlaces
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.dense.parallel.shard_units import ParameterUnit, find_units
from bagpipe.dense.parallel.unit_shard import UnitShard
from bagpipe.distributed.interface import RankGroup
from bagpipe.types.shard_level import ShardLevel

__all__ = ["StageShards", "StageShare"]


class StageShare:
    """One rank's share of a stage. The holders make the same calls, from one thread each.

    Args:
        units: of the stage.
        level: what is divided; not none.
        group: the holders.
        steps: a second communicator of the holders, for `add_up` in the lane of the steps; None: it is not called.

    Attributes:
        level: as given.
        rank: of this process, among the holders.
        shards: of the units.
        segments: this rank's part of each trainable parameter, by name. An optimizer steps them.
        wholes: the parameter of each segment.
        places: level parameters: what graphs save of the whole ones.
    """

    def __init__(
        self, units: Sequence[ParameterUnit], level: ShardLevel, group: RankGroup, steps: RankGroup | None = None
    ) -> None:
        self.level = level
        self.rank = group.rank
        self.shards = tuple(UnitShard(unit, level=level, rank=group.rank, num_ranks=group.world_size) for unit in units)
        self.segments: Mapping[str, nn.Parameter] = {
            name: segment for shard in self.shards for name, segment in zip(shard.names, shard.segments, strict=True)
        }
        self.wholes: Mapping[nn.Parameter, nn.Parameter] = {
            segment: whole
            for shard in self.shards
            for segment, whole in zip(shard.segments, shard.parameters, strict=True)
        }
        self._group = group
        self._steps = steps
        self.places = SavedPlaces()
        self._is_apart = self._arrives_later = False

    def reduce(self) -> None:
        """Sum the gradients, complete on each holder, over the holders; the segments then have theirs.

        Raises:
            PeerError: a peer is gone or silent.
            InputError: a gradient is sparse, or something keeps a view of a parameter that was released.
        """
        for shard in self.shards:
            shard.check_left()
            for position, parameter in enumerate(shard.parameters):
                if parameter.grad is not None:
                    shard.take(position)
            shard.exchange(self._group, is_marked=False)
            shard.land()

    def show(self, wanted: Container[str]) -> None:
        """Give parameters their whole gradients; see `UnitShard.show`. After `reduce`, by all holders."""
        for shard in self.shards:
            shard.show(wanted, self._group)

    def take_shown(self, wanted: Container[str]) -> None:
        """The segments take the gradients that parameters have now; see `UnitShard.take_shown`."""
        for shard in self.shards:
            shard.take_shown(wanted)

    def gather(self) -> None:
        """The stage has its whole parameters: the new ones after a step, or again after `release`.

        Raises:
            PeerError: a peer is gone or silent.
        """
        for shard in self.shards:
            shard.allocate()
            shard.gather(self._group)
            if not self._arrives_later:
                self.places.arrive(shard)
                shard.open()

    def live_apart(self) -> None:
        """See `UnitShard.live_apart`; before the first run.

        A step is then `reduce`, the optimizer's step, `copy_share`, `gather` in whatever lane, and, below level
        parameters, `arrive`.
        """
        self._is_apart, self._arrives_later = True, self.level != "parameters"
        for shard in self.shards:
            shard.live_apart(keeps_share=self.level == "parameters")

    def adopt(self) -> None:
        """Below level parameters the segments get the values of the parameters; there `begin` does this."""
        for shard in self.shards if self.level != "parameters" else ():
            shard.adopt()

    def copy_share(self) -> None:
        """Copy segments that lie apart for the next `gather`, by who moves them."""
        for shard in self.shards:
            shard.copy_share()

    @property
    def is_gathered(self) -> bool:
        """New values of parameters that lie apart wait for `arrive`."""
        return self._arrives_later and any(shard.is_gathered for shard in self.shards)

    def arrive(self) -> None:
        """Parameters that lie apart get the values that were gathered."""
        for shard in self.shards:
            shard.arrive()

    def release(self) -> None:
        """Level parameters: let go of the whole parameters. Idempotent."""
        if self.level == "parameters":
            for shard in self.shards:
                self.places.release(shard)

    def begin(self, pipes: Sequence[Sequence[nn.Parameter]]) -> None:
        """A run begins: each holder keeps its share of the parameters, which are whole.

        Args:
            pipes: the stage's parameters, and copies of them for other pipes in this process, all in one order.

        Raises:
            InputError: something keeps a view of a parameter.
        """
        if self.level != "parameters":
            return
        own, *others = pipes
        place = {id(parameter): number for number, parameter in enumerate(own)}
        for shard in self.shards:
            shard.follow([[other[place[id(parameter)]] for parameter in shard.parameters] for other in others])
            shard.adopt()
        if self._is_apart:
            self.copy_share()
        self.release()
        for shard in self.shards:
            shard.check_left()

    def clear(self) -> None:
        """Forget the gradients."""
        for shard in self.shards:
            shard.clear()

    def checked(self) -> Iterator[tuple[str, Tensor]]:
        """Names of the parameters, and values that are finite if the gradients of all holders are; after `reduce`."""
        for shard in self.shards:
            for name, segment in zip(shard.names, shard.segments, strict=True):
                if segment.grad is not None:
                    yield name, segment.grad
            yield from zip(shard.names, shard.flags(), strict=True)

    def pieces(self) -> Mapping[str, Piece]:
        """Place and whole shape of each segment in its parameter, by name."""
        return {name: piece for shard in self.shards for name, piece in shard.pieces().items()}

    def add_up(self, vector: Tensor) -> Tensor:
        """The sum of the holders' vectors, in rank order. All holders call it in the lane of the stage's steps.

        Raises:
            PeerError: a peer is gone or silent.
        """
        assert self._steps is not None, "opened for the optimizers that need it"
        return add_up(self._steps, vector)

    def joined(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, by name, of which each holder has the elements of its segments.

        Args:
            parts: of this rank, each of the length of its segment; of the same names on all holders, which all call it.

        Raises:
            PeerError: a peer is gone or silent.
        """
        return {name: whole for shard in self.shards for name, whole in shard.join(parts, self._group)}

    def whole_states(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Each parameter with its whole state, of an optimizer of the segments. All holders call it, between steps.

        Raises:
            PeerError: a peer is gone or silent.
        """
        for shard in self.shards:
            for position, (parameter, segment) in enumerate(zip(shard.parameters, shard.segments, strict=True)):
                state = optimizer.state.get(segment, {})
                if state:
                    yield (
                        parameter,
                        {
                            name: shard.joined(position, value, self._group)
                            if isinstance(value, Tensor) and value.ndim
                            else value
                            for name, value in sorted(state.items())
                        },
                    )

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of gradients and parameters that this rank has sent so far."""
        return sum(shard.num_sent_bytes for shard in self.shards)


class StageShards(Mapping[int, StageShare]):
    """This rank's shares, by stage.

    Args:
        model: the whole model.
        stages: all of them, by number, equal on all ranks.
        groups: this rank's groups, keyed by their ascending ranks: the result of `TorchPeers.open_stage_groups`.
        rank: this rank.
        level: what is divided; not none.
        wrap: see `find_units`.
        steps: by stage, a second communicator of its holders, a separate one for each stage; empty: no step needs one.

    Raises:
        InputError: see `find_units`, or something keeps a view of a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[HeldStage],
        groups: Mapping[tuple[int, ...], RankGroup],
        *,
        rank: int,
        level: ShardLevel,
        wrap: Sequence[str] = (),
        steps: Mapping[int, RankGroup] = MappingProxyType({}),
    ) -> None:
        units = find_units(model, wrap)
        self._shares: dict[int, StageShare] = {}
        for number, stage in enumerate(stages):
            own = _of_stage(units, stage)
            if own and rank in stage.holders and len(stage.holders) > 1:
                self._shares[number] = StageShare(own, level, groups[tuple(sorted(stage.holders))], steps.get(number))
        for shard in (shard for share in self._shares.values() for shard in share.shards):
            shard.check_left()

    def __getitem__(self, stage: int) -> StageShare:
        return self._shares[stage]

    def __iter__(self) -> Iterator[int]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)


def _of_stage(units: Sequence[ParameterUnit], stage: HeldStage) -> tuple[ParameterUnit, ...]:
    """The units' parameters that are a stage's, in the order of the units."""
    own = {id(parameter) for _, parameter in stage.parameters}
    parts = [
        (unit, tuple((name, parameter) for name, parameter in unit.parameters if id(parameter) in own))
        for unit in units
    ]
    return tuple(
        ParameterUnit(name=unit.name, module=unit.module, parameters=parameters)
        for unit, parameters in parts
        if parameters
    )
