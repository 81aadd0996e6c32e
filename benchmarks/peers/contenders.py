"""Input and output of a trial, and the table of contenders. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CONTENDERS", "Outcome", "Task", "Trait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Input of a trial.

    Attributes:
        setting, contender: names.
        repeat: number of this run of the contender in the setting.
        data: `data` section of the configuration: path, format, limit.
        url, fill_url: URLs of the store's server, through the link and past it.
        interface: our end of the link; for several ranks `lo` of their namespace.
        server_pid: process id of the store's server.
        rank, world_size, port: of torchrec's process group.
    """

    setting: str
    contender: str
    repeat: int
    data: Mapping[str, Any]
    url: str
    fill_url: str
    interface: str
    server_pid: int
    rank: int = 0
    world_size: int = 1
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Output of a trial.

    Attributes:
        setting, contender, repeat: as in the task.
        step_s: seconds of the measured steps.
        auc: of the held-out examples.
        loss: mean of the first steps; equal for equal work.
        bytes_per_step: on the network, both directions, headers included.
        peak_bytes: peak resident memory of this process.
        helpers_peak_bytes: peak resident memory of the processes it started.
        rows_peak_bytes: of that, rows with their optimizer state.
        hit_rate: of the cache; None: there is no cache.
        own_cores, other_cores: cores used by the contender with its server, and by other jobs.
        processor_ms: processor time of a step by part: threads of this process, and processes beside it.
    """

    setting: str
    contender: str
    repeat: int
    step_s: tuple[float, ...]
    auc: float | None
    loss: float
    bytes_per_step: float
    peak_bytes: int
    helpers_peak_bytes: int
    rows_peak_bytes: int
    hit_rate: float | None
    own_cores: float
    other_cores: float
    processor_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """Properties of a contender.

    Attributes:
        what: one line for the report.
        uses_store: whether its rows are in the store.
        cached: whether it has a cache, of the setting's size.
        client: `store.client` of ours.
        world_size: number of processes.
        is_floor: torchrec with all rows local: the baseline of our ratios.
    """

    what: str
    uses_store: bool = False
    cached: bool = False
    client: Literal["thread", "process"] = "thread"
    world_size: int = 1
    is_floor: bool = False


#: In the order of the report.
CONTENDERS: Mapping[str, Trait] = {
    "ours cached": Trait(what="bagpipe, cache and lookahead", uses_store=True, cached=True),
    "ours process": Trait(
        what="the same, with the client of the store in a process of its own",
        uses_store=True,
        cached=True,
        client="process",
    ),
    "ours direct": Trait(what="bagpipe without a cache", uses_store=True),
    "torchrec": Trait(
        what="EmbeddingBagCollection in DistributedModelParallel, fused Adagrad, a plain loop", is_floor=True
    ),
    "torchrec pipelined": Trait(what="the same in TrainPipelineSparseDist", is_floor=True),
    "fbgemm tables": Trait(what="the kernel torchrec uses, without torchrec around it"),
    "torchrec 2 ranks": Trait(what="row-wise over two gloo ranks, half a batch each", world_size=2),
    "torch sparse": Trait(what="nn.EmbeddingBag(sparse=True), torch.optim.Adagrad"),
    "lru over redis-py": Trait(what="read-through LRU of as many rows as ours", uses_store=True, cached=True),
    "redis-py": Trait(what="MGET and MSET of every batch's rows", uses_store=True),
}
