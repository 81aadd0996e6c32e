"""Checks of a whole configuration: every value in its key's range, and keys that depend on each other.

    Config ──Key.range (one key each)──> in range? ──RULES (several keys)──> consistent? ──> None, or one InputError

Checks only what the configuration alone decides. Imports neither torch nor numpy, so programs refuse bad values fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from bagpipe.config.admission_rules import ADMISSION_PROBLEMS
from bagpipe.config.dense_rules import DENSE_PROBLEMS
from bagpipe.config.expiry_rules import EXPIRY_PROBLEMS
from bagpipe.config.keys import config_keys
from bagpipe.config.model_rules import MODEL_PROBLEMS
from bagpipe.config.optim_rules import CHANGEABLE, OPTIM_PROBLEMS
from bagpipe.config.pipeline_rules import PIPELINE_PROBLEMS, predicts_weights
from bagpipe.config.sections import CheckpointConfig, Config
from bagpipe.config.stream_rules import STREAM_PROBLEMS
from bagpipe.errors import InputError
from bagpipe.types.schema import ROW_TYPES
from bagpipe.util.redaction import redact

__all__ = ["check_config"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check of keys that depend on each other.

    Attributes:
        path: the key that the message begins with.
        problem: the rest of the message, or None if the configuration is consistent.
    """

    path: str
    problem: Callable[[Config], str | None]


def _path_problem(config: Config) -> str | None:
    if config.data.format == "synthetic" or config.data.path:
        return None
    return f"{config.data.format} needs data.path, a file or folder, got none"


def _eval_path_problem(config: Config) -> str | None:
    data = config.data
    if not data.eval_path:
        return None
    if data.eval_fraction:
        return f"{data.eval_path} needs data.eval_fraction 0, got {data.eval_fraction:g}: evaluate with one of the two"
    return None if data.path else f"{data.eval_path} needs data.path, the training examples, got none"


def _test_path_problem(config: Config) -> str | None:
    if not config.data.test_path or config.data.path:
        return None
    return f"{config.data.test_path} needs data.path, the training examples, got none"


def _shuffle_buffer_problem(config: Config) -> str | None:
    if not config.data.shuffle_buffer or config.data.shuffle:
        return None
    return f"{config.data.shuffle_buffer} needs data.shuffle true, got false"


def _horizon_problem(config: Config) -> str | None:
    if config.oracle.horizon == "window" or config.oracle.policy != "drop-unused":
        return None
    return "log orders rows that the window does not use, and oracle.policy drop-unused keeps none of them"


def _shard_tables_problem(config: Config) -> str | None:
    if not config.cacher.shard_tables or config.cacher.shards:
        return None
    return f"{','.join(config.cacher.shard_tables)} needs cacher.shards, whose tables it names, got none"


def _row_dtype_problem(config: Config) -> str | None:
    rows, run = config.cache.dtype, config.run.dtype
    if rows == "run" or ROW_TYPES[rows].compute == run:
        return None
    return f"{rows} needs run.dtype {ROW_TYPES[rows].compute}, got {run}"


def _durability_problem(config: Config) -> str | None:
    if config.store.durability == "memory" or config.store.url or config.run.dir:
        return None
    return f"{config.store.durability} needs run.dir, a folder for the job's own store, or store.url; got neither"


def _client_problem(config: Config) -> str | None:
    if config.store.client == "thread" or not config.store.url.startswith("memory:"):
        return None
    return f"{config.store.client} needs a server, got store.url memory://, whose rows are in the training process"


def _password_problem(config: Config) -> str | None:
    if not config.store.password_file or config.store.url:
        return None
    return f"{config.store.password_file} needs store.url, the server that asks for the password, got none"


def _every_problem(config: Config) -> str | None:
    if config.checkpoint.every in (0, CheckpointConfig.every) or config.checkpoint.dir:
        return None
    return f"{config.checkpoint.every} needs checkpoint.dir, a folder, got none"


def _start_from_problem(config: Config) -> str | None:
    checkpoint, store = config.checkpoint, config.store
    if not checkpoint.start_from:
        return None
    if not checkpoint.dir:
        return f"{checkpoint.start_from} needs checkpoint.dir, the new job's folder, got none"
    if store.existing == "rows-only":
        return f"{checkpoint.start_from} needs store.existing refuse or reset, got rows-only"
    return None


def _start_without_problem(config: Config) -> str | None:
    names = config.checkpoint.start_without
    if not names or config.checkpoint.start_from:
        return None
    return f"{','.join(names)} needs checkpoint.start_from, got none"


def _resume_problem(config: Config) -> str | None:
    if config.checkpoint.resume in ("auto", "never") or config.checkpoint.dir:
        return None
    return f"{config.checkpoint.resume} needs checkpoint.dir, a folder, got none"


def _mirror_problem(config: Config) -> str | None:
    mirror = config.checkpoint.mirror
    if not mirror:
        return None
    if "://" not in mirror:
        return f"{mirror} is no URL such as s3://bucket/jobs/a"
    return None if config.checkpoint.dir else f"{mirror} needs checkpoint.dir, a folder, got none"


def _change_problem(config: Config) -> str | None:
    names = config.checkpoint.change
    unknown = [name for name in names if name not in CHANGEABLE]
    if unknown:
        return f"must be some of {', '.join(CHANGEABLE)}, got {unknown[0]!r}"
    if not names or config.checkpoint.dir:
        return None
    return f"{','.join(names)} needs checkpoint.dir, a folder, got none"


def _held_out_problem(config: Config) -> str | None:
    if not config.eval.every or config.data.has_evaluation:
        return None
    return f"{config.eval.every} needs held-out examples (data.eval_fraction above 0, or data.eval_path), got none"


def _unit_problem(config: Config) -> str | None:
    if config.eval.unit == "step" or config.eval.every:
        return None
    return f"{config.eval.unit} needs eval.every, the epochs between evaluations, got 0"


def _max_rows_problem(config: Config) -> str | None:
    if not config.cache.max_rows or config.cache.rows == "auto":
        return None
    return f"{config.cache.max_rows} needs cache.rows auto, got {config.cache.rows}"


def _patience_problem(config: Config) -> str | None:
    if not config.eval.patience or config.eval.every:
        return None
    return f"{config.eval.patience} needs eval.every, the steps or epochs between evaluations, got 0"


def _best_problem(config: Config) -> str | None:
    if not config.eval.keep_best or (config.eval.every and config.checkpoint.dir):
        return None
    return "true needs eval.every, the steps or epochs between evaluations, and checkpoint.dir, a folder"


def _autocast_problem(config: Config) -> str | None:
    if config.run.autocast == "off" or config.run.dtype == "float32":
        return None
    return f"{config.run.autocast} needs run.dtype float32, got {config.run.dtype}"


def _growth_problem(config: Config) -> str | None:
    steps = config.run.loss_scale_growth_interval
    if not steps:
        return None
    if config.pipeline.rows_delay:
        return (
            f"{steps} is not possible with pipeline.rows_delay 1: a forward begins before it is known whether the "
            "batch before was finite"
        )
    return None if config.run.nonfinite == "skip" else f"{steps} needs run.nonfinite skip, got {config.run.nonfinite}"


def _cuda_graph_problem(config: Config) -> str | None:
    if not config.run.cuda_graph or config.run.device.startswith("cuda"):
        return None
    return f"needs run.device cuda, got {config.run.device}"


def _verify_problem(config: Config) -> str | None:
    batches, optim = config.run.verify, config.optim
    if not batches:
        return None
    if not config.pipeline.is_staged:
        return f"{batches} needs pipeline.schedule, the name of a schedule, got none"
    if config.checkpoint.start_from:
        return f"{batches} is not possible with checkpoint.start_from: the reference has the state of a new job"
    if predicts_weights(config.pipeline) and (optim.schedule != "constant" or optim.warmup_steps):
        return (
            f"{batches} with predicted weights (pipeline.schedule {config.pipeline.schedule}) needs a constant rate: "
            f"optim.schedule constant and optim.warmup_steps 0, got {optim.schedule} and {optim.warmup_steps}"
        )
    return None


def _peer_problem(config: Config) -> str | None:
    if config.run.peer_timeout_s > config.store.timeout_s:
        return None
    # A rank that waits for its store sends nothing to its peers, which must not take it for dead.
    return f"must be more than store.timeout_s ({config.store.timeout_s:g}), got {config.run.peer_timeout_s:g}"


def _group_problem(config: Config) -> str | None:
    if config.eval.metric.partition("@")[0] != "gauc" or config.eval.group:
        return None
    return f"{config.eval.metric} needs eval.group, the feature whose ids are the groups, got none"


RULES: tuple[Rule, ...] = (
    Rule("data.format", _path_problem),
    Rule("data.eval_path", _eval_path_problem),
    Rule("data.test_path", _test_path_problem),
    Rule("data.shuffle_buffer", _shuffle_buffer_problem),
    *(Rule(path, problem) for path, problem in STREAM_PROBLEMS.items()),
    *(Rule(path, problem) for path, problem in ADMISSION_PROBLEMS.items()),
    *(Rule(path, problem) for path, problem in EXPIRY_PROBLEMS.items()),
    Rule("oracle.horizon", _horizon_problem),
    Rule("cacher.shard_tables", _shard_tables_problem),
    Rule("cache.dtype", _row_dtype_problem),
    Rule("store.password_file", _password_problem),
    Rule("store.durability", _durability_problem),
    Rule("store.client", _client_problem),
    Rule("checkpoint.every", _every_problem),
    Rule("checkpoint.resume", _resume_problem),
    Rule("checkpoint.mirror", _mirror_problem),
    Rule("checkpoint.change", _change_problem),
    Rule("checkpoint.start_from", _start_from_problem),
    Rule("checkpoint.start_without", _start_without_problem),
    Rule("eval.every", _held_out_problem),
    Rule("eval.unit", _unit_problem),
    Rule("eval.metric", _group_problem),
    Rule("cache.max_rows", _max_rows_problem),
    Rule("eval.patience", _patience_problem),
    Rule("eval.keep_best", _best_problem),
    *(Rule(path, problem) for path, problem in MODEL_PROBLEMS.items()),
    *(Rule(path, problem) for path, problem in PIPELINE_PROBLEMS.items()),
    *(Rule(path, problem) for path, problem in OPTIM_PROBLEMS.items()),
    *(Rule(path, problem) for path, problem in DENSE_PROBLEMS.items()),
    Rule("run.autocast", _autocast_problem),
    Rule("run.loss_scale_growth_interval", _growth_problem),
    Rule("run.cuda_graph", _cuda_graph_problem),
    Rule("run.verify", _verify_problem),
    Rule("run.peer_timeout_s", _peer_problem),
)


def check_config(config: Config, subjects: Mapping[str, str] | None = None, unused: Collection[str] = ()) -> None:
    """Check every value of a configuration.

    Args:
        config: the configuration, of any origin.
        subjects: by key path, what the message calls a key that the user gave: ``file.toml:3: data.limit`` or
            ``--data.limit``.
        unused: sections that the program does not use: their keys need no others.

    Raises:
        InputError: the first value out of range: its key, what was expected and what came.
    """
    names = subjects or {}
    for key in config_keys():
        value = getattr(getattr(config, key.section), key.name)
        if key.range is not None and not key.range.contains(value):
            raise InputError(f"{names.get(key.path, key.path)} must be {key.range.words}, got {redact(repr(value))}")
    for rule in RULES:
        problem = rule.problem(config) if rule.path.partition(".")[0] not in unused else None
        if problem is not None:
            raise InputError(f"{names.get(rule.path, rule.path)} {problem}")
