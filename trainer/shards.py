"""The dense part divided among the ranks of a job, from its configuration.

dense.{shard,wrap} ──check_shards──> enough ranks?     model ──find_units──> ShardedModel, with two groups of ranks
"""

from __future__ import annotations

from torch import nn

from bagpipe.config.dense_section import DenseConfig
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError

__all__ = ["check_shards", "open_shards"]


def check_shards(dense: DenseConfig, world_size: int) -> None:
    """Raise InputError if there are no ranks to divide the dense part among."""
    if dense.shard != "none" and world_size < 2:
        raise InputError(f"dense.shard {dense.shard} needs at least 2 ranks, got {world_size}")


def open_shards(model: nn.Module, dense: DenseConfig, peers: TorchPeers) -> ShardedModel:
    """Divide a model. All ranks call it alike; the result is to be entered.

    Raises:
        InputError: the model cannot be divided this way.
        PeerError: the ranks cannot reach each other.
    """
    units = find_units(model, dense.wrap)
    (gathers,) = peers.open_stage_groups([range(peers.world_size)]).values()
    return ShardedModel(model, units, dense.shard, sums=peers.dense, gathers=gathers)
