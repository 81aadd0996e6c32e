"""`ShardLevel`: what ranks with the same dense parameters divide among them (ZeRO)."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["SHARD_LEVELS", "ShardLevel"]

#: Nothing, optimizer state, gradients or parameters too; each level includes those before it.
ShardLevel: TypeAlias = Literal["none", "optimizer", "gradients", "parameters"]
SHARD_LEVELS: tuple[ShardLevel, ...] = get_args(ShardLevel)
