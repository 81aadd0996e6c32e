"""`on_ranks`: a test's function once per rank, in processes of their own as torchrun starts them; batches in shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from bagpipe.distributed.membership import Membership
from tests.distributed.processes import Ended, run_ranks
from tests.train_pipeline.small import FEATURES, Small, batches, pipeline

__all__ = ["SIZES", "cut", "join", "joined", "made", "on_ranks", "shard", "values_of"]

#: Examples of a batch, by rank.
SIZES = (8, 5)


def on_ranks(world_size: int, work: Callable[..., Any], *args: object) -> list[Ended]:
    """Run ``work(rank, *args)`` on every rank, with the environment that torchrun gives it."""
    return run_ranks(world_size, _as_launched, work, args)


def _as_launched(membership: Membership, work: Callable[..., Any], args: tuple[object, ...]) -> Any:
    join(membership)
    return work(membership.rank, *args)


def join(membership: Membership) -> None:
    """Tell this process of its rank as torchrun does, by the environment."""
    os.environ |= {
        "RANK": str(membership.rank),
        "LOCAL_RANK": str(membership.local_rank),
        "WORLD_SIZE": str(membership.world_size),
        "LOCAL_WORLD_SIZE": str(membership.local_world_size),
        "MASTER_ADDR": membership.address,
        "MASTER_PORT": str(membership.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(membership.store_is_launchers),
    }


def made(model: torch.nn.Module | None = None, **more: Any) -> Any:
    """A pipeline of several ranks, in float64, over a private server."""
    return pipeline(Small().double() if model is None else model, **{"store": None, **more})


def shard(rank: int, num: int = 12, seed: int = 0) -> list[Any]:
    """A rank's batches; those of rank 1 are smaller."""
    return [cut(batch, SIZES[rank]) for batch in batches(num, seed=seed + 100 * rank, dtype=torch.float64)]


def cut(batch: Any, num: int) -> Any:
    """The first examples of a batch."""
    return joined([batch], num)


def joined(parts: Sequence[Any], num: int | None = None) -> Any:
    """One batch of the examples of several, in their order."""
    values, lengths = [], []
    for name in FEATURES:
        for part in parts:
            found = part["ids"].to_dict()[name]
            kept = found.lengths()[:num]
            lengths.append(kept)
            values.append(found.values()[: int(kept.sum())])
    return {
        "ids": KeyedJaggedTensor.from_lengths_sync(
            keys=list(FEATURES), values=torch.cat(values), lengths=torch.cat(lengths)
        ),
        "labels": torch.cat([part["labels"][:num] for part in parts]),
    }


def values_of(state: dict[str, Tensor]) -> dict[str, Any]:
    """A state that can be sent between processes."""
    return {name: value.numpy() for name, value in state.items()}
