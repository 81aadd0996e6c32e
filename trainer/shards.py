"""The dense part divided among the ranks of a job, from its configuration.

dense.{shard,wrap} ──check_shards──> enough ranks?     model ──find_units──> ShardedModel, with two groups of ranks
                   ──check_holders─> a stage on several ranks?      stages ──> StageShards, with a group per stage
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import nn

from bagpipe.config.dense_section import DenseConfig
from bagpipe.config.optim_section import OptimConfig
from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.dense.parallel.stage_shards import StageShards
from bagpipe.distributed.interface import RankGroup
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.mesh import Mesh

__all__ = ["check_holders", "check_shards", "open_shards", "open_stage_shards", "open_step_groups"]


class StagePeers(Protocol):
    """Opens groups of the ranks that hold stages; see `TorchPeers.open_stage_groups`."""

    def open_stage_groups(
        self, holders: Collection[Sequence[int]], purpose: str = "sums"
    ) -> Mapping[tuple[int, ...], RankGroup]: ...


def check_shards(dense: DenseConfig, world_size: int) -> None:
    """Raise InputError if there are no ranks to divide the dense part among."""
    if dense.shard != "none" and world_size < 2:
        raise InputError(f"dense.shard {dense.shard} needs at least 2 ranks, got {world_size}")


def check_holders(dense: DenseConfig, mesh: Mesh) -> None:
    """Raise InputError if stages are to be divided and each is on one rank."""
    num_stages = mesh.step.graph.num_stages
    if dense.shard != "none" and all(len(mesh.holders(stage)) == 1 for stage in range(num_stages)):
        raise InputError(
            f"dense.shard {dense.shard} divides a stage among the ranks that hold it, so a stage must be on several: "
            f"expected 2 or more times {mesh.step.num_processes} ranks, or pipeline.replicas, got {mesh.world_size}"
        )


def open_stage_shards(
    model: nn.Module,
    dense: DenseConfig,
    stages: Sequence[HeldStage],
    groups: Mapping[tuple[int, ...], RankGroup],
    rank: int,
    steps: Mapping[int, RankGroup] = MappingProxyType({}),
) -> StageShards:
    """Divide the stages of a model among the ranks that hold them; see `StageShards`.

    Raises:
        InputError: the model cannot be divided.
    """
    return StageShards(model, stages, groups, rank=rank, level=dense.shard, wrap=dense.wrap, steps=steps)


def open_step_groups(optim: OptimConfig, stages: Sequence[HeldStage], peers: StagePeers) -> Mapping[int, RankGroup]:
    """By stage, communicators of its holders for the optimizer's steps; empty: the optimizer needs none.

    Raises:
        PeerError: the ranks cannot reach each other.
    """
    if optim.dense != "lamb":
        return {}
    found: dict[int, RankGroup] = {}
    for number, stage in enumerate(stages):
        for group in peers.open_stage_groups([stage.holders], f"steps {number}").values():
            found[number] = group
    return found


def open_shards(
    model: nn.Module, dense: DenseConfig, peers: TorchPeers, compiled: nn.Module | None = None
) -> ShardedModel:
    """Divide a model. All ranks call it alike; the result is to be entered.

    Args:
        model: the model.
        dense: how.
        peers: among whom.
        compiled: the module whose forward is compiled; None: there is none.

    Raises:
        InputError: the model cannot be divided this way.
        PeerError: the ranks cannot reach each other.
    """
    units = find_units(model, dense.wrap, compiled if dense.shard == "parameters" else None)
    (gathers,) = peers.open_stage_groups([range(peers.world_size)]).values()
    return ShardedModel(model, units, dense.shard, sums=peers.dense, gathers=gathers)
