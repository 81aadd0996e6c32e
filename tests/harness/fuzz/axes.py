"""The axes of the pairwise array: features of a job, each with a few values, and which values go together.

AXES: axis -> value -> the keys that ask for it        row of values ──keys_of──> flags ──config_of, ranks──> problem
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from tests.harness.fuzz.covering import Axes, Row
from tests.harness.fuzz.space import choices_of, config_of
from trainer.shards import check_shards
from trainer.stages import check_ranks

__all__ = ["AXES", "RANKS", "WEIGHTED", "keys_of", "problem"]

#: Key path -> value as a flag.
Keys = Mapping[str, str]

#: The axis whose values are numbers of ranks, which are no key.
RANKS = "ranks"

_ONE = {"pipeline.stages": "1", "pipeline.microbatches": "1", "pipeline.rows_delay": "0"}
_STAGES = {"pipeline.stages": "2", "pipeline.microbatches": "4", "pipeline.rows_delay": "0"}
_WHOLE_ROWS = {"cache.dtype": "run", "run.autocast": "off"}
_CONSTANT = {"run.loss_scale_growth_interval": "0"}

#: Where a value is one of docs/dense.md's table of pairs, it has its name there.
AXES: Mapping[str, Mapping[str, Keys]] = {
    "order": {
        "whole": {"pipeline.schedule": "none", **_ONE},
        "stages": {"pipeline.schedule": "1f1b", **_STAGES},
        "asynchronous schedule": {"pipeline.schedule": "pipedream-2bw", **_STAGES},
        "free order": {"pipeline.schedule": "dynamic", **_STAGES},
        "predicted weights": {"pipeline.schedule": "spectrain", **_STAGES},
        "rows read a batch late": {"pipeline.schedule": "pipedream-2bw", **_STAGES, "pipeline.rows_delay": "1"},
    },
    "replicas": {"alike": {"pipeline.replicas": ""}, "unlike replicas": {"pipeline.replicas": "3,1"}},
    "processes": {"of ranks": {"pipeline.processes": "auto"}, "with all stages": {"pipeline.processes": "1"}},
    "compiler": {"eager": {"run.compile": "false"}, "compiled": {"run.compile": "true"}},
    "check": {"unverified": {"run.verify": "0"}, "verification": {"run.verify": "3"}},
    "division": {
        "undivided": {"dense.shard": "none", "dense.wrap": ""},
        "shares of states": {"dense.shard": "optimizer"},
        "shares (ZeRO)": {"dense.shard": "gradients"},
        "shares of parameters": {"dense.shard": "parameters"},
    },
    "memory": {
        "resident": {"dense.budget_bytes": "0", "dense.state": "device", "dense.chunk_bytes": "0"},
        "chunks in a budget": {"dense.budget_bytes": "64000000", "dense.state": "device"},
        "chunks": {"dense.budget_bytes": "0", "dense.state": "host"},
    },
    "preconditioner": {
        "none": {"optim.precondition": "none", "optim.kfac_lag": "0"},
        "K-FAC": {"optim.precondition": "kfac", "optim.kfac_lag": "0", "optim.kfac_inverse_every": "3"},
        "K-FAC with a lag": {
            "optim.precondition": "kfac",
            "optim.kfac_lag": "1",
            "optim.kfac_inverse_every": "3",
        },
    },
    "backward": {
        "whole backward": {"pipeline.backward_shares": ""},
        "partial backward": {"pipeline.backward_shares": "0.5,1"},
    },
    "activations": {
        "device activations": {"pipeline.activations": "device"},
        "host activations": {"pipeline.activations": "host"},
    },
    "limit": {
        "no limit": {"optim.clip_norm": "0", "optim.clip_scope": "dense", "optim.clip_value": "0"},
        "limit of the norm": {"optim.clip_norm": "0.1", "optim.clip_scope": "all", "optim.clip_value": "0"},
        "limit of elements": {"optim.clip_norm": "0", "optim.clip_scope": "dense", "optim.clip_value": "0.001"},
    },
    "bad batches": {
        "end the job": {"run.nonfinite": "stop", **_CONSTANT},
        "batches left out": {"run.nonfinite": "skip", **_CONSTANT},
        "growing loss scale": {"run.nonfinite": "skip", "run.loss_scale_growth_interval": "3"},
    },
    "averages": {
        "no averages": {"optim.ema_decay": "0", "optim.ema_evaluate": "false"},
        "averages of weights": {"optim.ema_decay": "0.5"},
    },
    "decay": {
        "no decay of rows": {"optim.rows_weight_decay": "0", "optim.rows_decay_kind": "decoupled"},
        "decay of rows": {"optim.rows_weight_decay": "0.01", "optim.rows_decay_kind": "decoupled"},
    },
    RANKS: {number: {} for number in ("1", "2", "4")},
    "dense optimizer": {
        # Of adagrad and sgd, which are row optimizers too.
        {"lamb": "LAMB"}.get(name, f"dense {name}"): {
            "optim.dense": name,
            "optim.momentum": "0",
            "optim.nesterov": "false",
        }
        for name in choices_of("optim.dense")
    },
    "row optimizer": {f"row {name}": {"optim.rows": name} for name in choices_of("optim.rows")},
    "precision": {
        "float32": {"run.dtype": "float32", **_WHOLE_ROWS},
        "float64": {"run.dtype": "float64", **_WHOLE_ROWS},
        "bfloat16 products": {"run.dtype": "float32", "cache.dtype": "run", "run.autocast": "bfloat16"},
        "float16 products": {"run.dtype": "float32", "cache.dtype": "run", "run.autocast": "float16"},
        "bfloat16 rows": {"run.dtype": "float32", "cache.dtype": "bfloat16", "run.autocast": "off"},
        "float16 rows": {"run.dtype": "float32", "cache.dtype": "float16", "run.autocast": "off"},
    },
    "model": {
        **{name: {"model.name": name} for name in choices_of("model.name") if name != "esmm"},  # it needs two labels
        "two heads": {"model.name": "dlrm", "model.factory": "tests.system.staged_models:two_heads"},
    },
}

#: Values that take time: a compiler's, and processes.
_WEIGHTS: Mapping[tuple[str, str], float] = {("compiler", "compiled"): 0.2, (RANKS, "4"): 0.5}

#: The axes as `tests.harness.fuzz.covering.cover` takes them.
WEIGHTED: Axes = {axis: {name: _WEIGHTS.get((axis, name), 1.0) for name in AXES[axis]} for axis in AXES}

#: Keys of the axes that a row has no value of yet: those that most values need.
_BESIDE: Keys = {"data.format": "synthetic", "pipeline.schedule": "1f1b", **_STAGES}


def keys_of(row: Row) -> dict[str, str]:
    """The keys that ask for the values of a row."""
    return {path: text for axis, name in row.items() for path, text in AXES[axis][name].items()}


def problem(row: Row) -> str:
    """Why values of some axes do not go together, as a job says it; empty: they do."""
    return _problem(tuple(sorted(row.items())))


@cache
def _problem(items: tuple[tuple[str, str], ...]) -> str:
    row = dict(items)
    try:
        config = config_of({**_BESIDE, **keys_of(row)})
        if RANKS in row:
            _check_world(config, int(row[RANKS]), row)
    except InputError as error:
        return str(error)
    return ""


def _check_world(config: Config, world_size: int, row: Row) -> None:
    """Raise InputError if so many ranks are not possible. Axes that are still open may make them so."""
    pipeline = config.pipeline
    check_shards(config.dense, world_size)
    if "replicas" in row and pipeline.replicas:
        check_ranks(pipeline, world_size)
    if not {"order", "processes", "replicas"} <= set(row):
        return
    num_ranks = 1
    if pipeline.schedule != "none":
        _, num_ranks = check_ranks(pipeline, world_size)
        if config.dense.is_chunked and world_size == 1 and pipeline.replicas:
            raise InputError(
                f"dense.budget_bytes is not possible with pipeline.schedule {pipeline.schedule} on 1 ranks: two lanes "
                f"of one process use the weights of a stage; use {num_ranks} ranks or a multiple"
            )
    if config.dense.shard != "none" and not pipeline.replicas and world_size // num_ranks < 2:
        raise InputError(
            f"dense.shard {config.dense.shard} divides a stage among the ranks that hold it, so a stage must be on "
            f"several: expected 2 or more times {num_ranks} ranks, or pipeline.replicas, got {world_size}"
        )
