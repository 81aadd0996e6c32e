"""Rules of the dense section: what chunks of the dense part do not go with. One line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.config.sections import Config

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
    run, optim = config.run, config.optim
    if config.pipeline.is_staged:
        return f"{value} is not possible with {config.pipeline.stages_text}"
    for name in ("compile", "cuda_graph"):
        if getattr(run, name):
            return f"{value} is not possible with run.{name}: compiled code keeps the addresses of parameters"
    if optim.clip_norm:
        return f"{value} is not possible with optim.clip_norm {optim.clip_norm:g}: a norm needs all gradients at once"
    if optim.ema_decay:
        return f"{value} is not possible with optim.ema_decay {optim.ema_decay:g}: averages are outside of the budget"
    return None


#: Key -> its rule.
DENSE_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "dense.chunk_bytes": _chunk_bytes_problem,
    "dense.budget_bytes": _budget_problem,
    "dense.state": _state_problem,
}
