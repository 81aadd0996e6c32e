"""Rules of the dense section: what chunks of the dense part, and its division among ranks, do not go with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.config.sections import Config
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES

__all__ = ["DENSE_PROBLEMS"]


def _chunk_bytes_problem(config: Config) -> str | None:
    if not config.dense.chunk_bytes or config.dense.is_chunked:
        return None
    return f"{config.dense.chunk_bytes} needs dense.budget_bytes, or dense.state host, got neither"


def _budget_problem(config: Config) -> str | None:
    return _chunks_problem(config, str(config.dense.budget_bytes)) if config.dense.budget_bytes else None


def _state_problem(config: Config) -> str | None:
    if config.dense.state == "device":
        return None
    if config.optim.dense == "sgd" and not config.optim.momentum:
        return "host needs an optimizer that keeps state, got optim.dense sgd with optim.momentum 0"
    return _chunks_problem(config, "host")


def _chunks_problem(config: Config, value: str) -> str | None:
    if config.run.cuda_graph:
        return f"{value} is not possible with run.cuda_graph: a captured graph keeps the addresses of parameters"
    return None


def _shard_problem(config: Config) -> str | None:
    shard = config.dense.shard
    if shard == "none":
        return None
    if shard == "parameters" and config.pipeline.schedule in ASYNCHRONOUS_SCHEDULES:
        return (
            f"{shard} is not possible with pipeline.schedule {config.pipeline.schedule}, whose stages compute without "
            f"a pause: each version of the whole weights stays on every rank that holds it; use gradients"
        )
    if config.dense.is_chunked and (problem := _chunked_share_problem(config)):
        return f"{shard} is not possible with dense.budget_bytes or dense.state host and {problem}: use none"
    if config.run.cuda_graph and shard == "parameters":
        return (
            f"{shard} is not possible with run.cuda_graph: a captured graph keeps the addresses of parameters; use "
            "gradients"
        )
    return None


def _chunked_share_problem(config: Config) -> str | None:
    """The setting that excludes chunks of shares; None: there is none."""
    if config.pipeline.schedule in ASYNCHRONOUS_SCHEDULES:
        return f"pipeline.schedule {config.pipeline.schedule}, whose versions in chunks are of whole weights"
    if config.optim.dense == "lamb":
        return "optim.dense lamb, whose steps of a chunk would need norms of what other ranks have in other chunks"
    return None


def _wrap_problem(config: Config) -> str | None:
    if not config.dense.wrap or config.dense.shard != "none":
        return None
    return f"{','.join(config.dense.wrap)} needs dense.shard optimizer, gradients or parameters, got none"


#: Key -> its rule.
DENSE_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "dense.chunk_bytes": _chunk_bytes_problem,
    "dense.budget_bytes": _budget_problem,
    "dense.state": _state_problem,
    "dense.shard": _shard_problem,
    "dense.wrap": _wrap_problem,
}
