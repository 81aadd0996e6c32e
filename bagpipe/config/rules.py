"""What a configuration's values may be: one table of rules for single keys, one for keys that depend on each other.

    Config ──RULES (one key each)──> in range? ──PAIR_RULES (several keys)──> fit together? ──> None, or one InputError

Only what the configuration alone decides is checked here; whether a batch fits the cache, or a store accepts the
schema, is found out where it is known. Nothing here imports torch or numpy, so programs refuse bad values at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bagpipe.config.sections import CheckpointConfig, Config
from bagpipe.errors import InputError
from bagpipe.schedule.builders import DENSE_SCHEDULES
from bagpipe.schedule.ir.errors import ScheduleError
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH, ROUNDINGS, ROW_TYPES

__all__ = ["ASSIGNMENTS", "DATA_FORMATS", "DENSE_OPTIMIZERS", "MODELS", "POLICIES", "check_config"]

DATA_FORMATS = ("avazu-csv", "criteo-tsv", "movielens", "parquet", "synthetic")
DURABILITIES = ("memory", "everysec", "always")  # as in bagpipe.store.redis.durability
NONFINITE = ("stop", "skip")
KERNELS = ("auto", "torch", "triton")  # as in bagpipe.kernels.open
AUTOCAST = ("off", "bfloat16", "float16")  # as in bagpipe.dense.precision
LOSS_SCALES = (0, *(2**exponent for exponent in range(25)))  # as in bagpipe.dense.loss_scale
POLICIES = ("belady-window", "drop-unused")
ASSIGNMENTS = ("contiguous", "locality")
MODELS = ("dlrm", "dcnv2", "deepfm", "wide-deep", "towers")
DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam")
DTYPES = ("float32", "float64")
POWERS_OF_TWO = tuple(2**exponent for exponent in range(17))


@dataclass(frozen=True, slots=True)
class Rule:
    """`test` of the value of one key; `words` completes "must be …"."""

    path: str
    words: str
    test: Callable[..., bool]


def _at_least(path: str, minimum: int) -> Rule:
    return Rule(path, f"at least {minimum}", lambda value: value >= minimum)


def _one_of(path: str, names: tuple[str, ...]) -> Rule:
    return Rule(path, f"one of {', '.join(names)}", lambda value: value in names)


def _is_address(value: str) -> bool:
    return value == "" or re.fullmatch(r"unix:.+|(grpcs?://)?[^/]+:\d{1,5}", value) is not None


RULES: tuple[Rule, ...] = (
    _one_of("data.format", DATA_FORMATS),
    _at_least("data.batch_size", 1),
    _at_least("data.limit", 0),
    _at_least("data.epochs", 1),
    Rule("data.eval_fraction", "at least 0 and below 1", lambda value: 0 <= value < 1),
    _one_of("data.bad_rows", ("stop", "skip")),
    _at_least("data.workers", 0),
    _at_least("oracle.lookahead", 1),
    _one_of("oracle.policy", POLICIES),
    _at_least("cache.rows", 0),
    _at_least("cache.prefetch_depth", 1),
    _one_of("cache.dtype", ("run", *ROW_TYPES)),
    _one_of("cache.rounding", ROUNDINGS),
    Rule(
        "store.namespace",
        "1 to 200 letters, digits or any of _.:/@+=-",  # the rule of bagpipe.store.keys: braces mark the bucket
        lambda value: re.fullmatch(r"[A-Za-z0-9_.:/@+=-]{1,200}", value) is not None,
    ),
    Rule("store.buckets", "a power of two from 1 to 65536", lambda value: value in POWERS_OF_TWO),
    Rule("store.timeout_s", "more than 0", lambda value: value > 0),
    _one_of("store.durability", DURABILITIES),
    Rule("cacher.url", "empty, unix:PATH, HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT", _is_address),
    _one_of("cacher.assign", ASSIGNMENTS),
    Rule("cacher.timeout_s", "more than 0", lambda value: value > 0),
    _one_of("model.name", MODELS),
    _at_least("model.embedding_dim", 1),
    Rule("model.bottom_mlp", "widths of at least 1", lambda value: all(width >= 1 for width in value)),
    Rule("model.top_mlp", "widths of at least 1", lambda value: all(width >= 1 for width in value)),
    Rule(
        "model.factory",
        'empty or "module:function"',
        lambda value: value == "" or re.fullmatch(r"[\w.]+:[\w.]+", value) is not None,
    ),
    _one_of("optim.rows", tuple(OPTIMIZER_STATE_WIDTH)),
    Rule("optim.rows_lr", "more than 0", lambda value: value > 0),
    _one_of("optim.dense", DENSE_OPTIMIZERS),
    Rule("optim.dense_lr", "more than 0", lambda value: value > 0),
    Rule("optim.eps", "at least 0", lambda value: value >= 0),
    Rule(
        "pipeline.schedule",
        f"one of none, {', '.join(DENSE_SCHEDULES)}, or a .csv table of PyTorch's",
        lambda value: value == "none" or value in DENSE_SCHEDULES or value.endswith(".csv"),
    ),
    _at_least("pipeline.stages", 1),
    _at_least("pipeline.microbatches", 1),
    _at_least("pipeline.chunks", 0),
    Rule(
        "pipeline.partition",
        'auto or "module=stage,…"',
        lambda value: value == "auto" or re.fullmatch(r"[\w.]+=\d+(,[\w.]+=\d+)*", value) is not None,
    ),
    _at_least("checkpoint.every", 0),
    Rule(
        "checkpoint.resume",
        "auto, never or a step number",
        lambda value: value in ("auto", "never") or re.fullmatch(r"\d+", value) is not None,
    ),
    _at_least("checkpoint.keep", 1),
    _at_least("checkpoint.full_every", 1),
    Rule("run.seed", "from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63),  # stored as a signed 64-bit number
    Rule("run.device", "cpu, cuda or cuda:N", lambda value: re.fullmatch(r"cpu|cuda(:\d+)?", value) is not None),
    _one_of("run.dtype", DTYPES),
    _at_least("run.steps", 0),
    _at_least("run.threads", 1),
    _one_of("run.nonfinite", NONFINITE),
    _one_of("run.kernels", KERNELS),
    _one_of("run.autocast", AUTOCAST),
    Rule("run.loss_scale", "0 or a power of two up to 2**24", lambda value: value in LOSS_SCALES),
    _at_least("run.loss_scale_growth_interval", 0),
    Rule("run.peer_timeout_s", "more than 0", lambda value: value > 0),
)


@dataclass(frozen=True, slots=True)
class PairRule:
    """`problem` of keys that depend on each other: the rest of a line that begins with `path`, or None."""

    path: str
    problem: Callable[[Config], str | None]


def _path_problem(config: Config) -> str | None:
    if config.data.format == "synthetic" or config.data.path:
        return None
    return f"{config.data.format} needs data.path, a file or folder, got none"


def _row_dtype_problem(config: Config) -> str | None:
    rows, run = config.cache.dtype, config.run.dtype
    if rows == "run" or ROW_TYPES[rows].compute == run:
        return None
    return f"{rows} needs run.dtype {ROW_TYPES[rows].compute}, got {run}"


def _durability_problem(config: Config) -> str | None:
    if config.store.durability == "memory" or config.store.url or config.run.dir:
        return None
    return f"{config.store.durability} needs run.dir, a folder for the job's own store, or store.url; got neither"


def _every_problem(config: Config) -> str | None:
    if config.checkpoint.every in (0, CheckpointConfig.every) or config.checkpoint.dir:
        return None
    return f"{config.checkpoint.every} needs checkpoint.dir, a folder, got none"


def _resume_problem(config: Config) -> str | None:
    if config.checkpoint.resume in ("auto", "never") or config.checkpoint.dir:
        return None
    return f"{config.checkpoint.resume} needs checkpoint.dir, a folder, got none"


def _stages_problem(config: Config) -> str | None:
    if config.pipeline.schedule != "none" or config.pipeline.stages == 1:
        return None
    return f"{config.pipeline.stages} needs pipeline.schedule, the name of a schedule, got none"


def _nonfinite_problem(config: Config) -> str | None:
    if config.run.nonfinite == "stop" or config.pipeline.schedule == "none":
        return None
    return (
        f"{config.run.nonfinite} is not possible with stages (pipeline.schedule {config.pipeline.schedule}): use stop"
    )


def _autocast_problem(config: Config) -> str | None:
    if config.run.autocast == "off" or config.run.dtype == "float32":
        return None
    return f"{config.run.autocast} needs run.dtype float32, got {config.run.dtype}"


def _growth_problem(config: Config) -> str | None:
    steps, schedule = config.run.loss_scale_growth_interval, config.pipeline.schedule
    if not steps:
        return None
    if schedule != "none":
        return f"{steps} is not possible with stages (pipeline.schedule {schedule}): use 0"
    return None if config.run.nonfinite == "skip" else f"{steps} needs run.nonfinite skip, got {config.run.nonfinite}"


def _cuda_graph_problem(config: Config) -> str | None:
    if not config.run.cuda_graph:
        return None
    if not config.run.device.startswith("cuda"):
        return f"needs run.device cuda, got {config.run.device}"
    pipeline = config.pipeline
    if pipeline.schedule != "none" or pipeline.microbatches > 1:
        return (
            f"is not possible with stages or micro-batches (pipeline.schedule {pipeline.schedule}, "
            f"pipeline.microbatches {pipeline.microbatches})"
        )
    return None


def _schedule_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if pipeline.schedule not in DENSE_SCHEDULES:
        return None
    try:
        DENSE_SCHEDULES[pipeline.schedule].build(chain(pipeline.stages, pipeline.microbatches), pipeline.chunks or None)
    except ScheduleError as error:
        return f"{pipeline.schedule} does not allow these pipeline.stages, microbatches and chunks: {error}"
    return None


def _peer_problem(config: Config) -> str | None:
    if config.run.peer_timeout_s > config.store.timeout_s:
        return None
    # A rank that waits for its store is silent for its peers; they must not take that for its end.
    return f"must be more than store.timeout_s ({config.store.timeout_s:g}), got {config.run.peer_timeout_s:g}"


PAIR_RULES: tuple[PairRule, ...] = (
    PairRule("data.format", _path_problem),
    PairRule("cache.dtype", _row_dtype_problem),
    PairRule("store.durability", _durability_problem),
    PairRule("checkpoint.every", _every_problem),
    PairRule("checkpoint.resume", _resume_problem),
    PairRule("pipeline.stages", _stages_problem),
    PairRule("pipeline.schedule", _schedule_problem),
    PairRule("run.nonfinite", _nonfinite_problem),
    PairRule("run.autocast", _autocast_problem),
    PairRule("run.loss_scale_growth_interval", _growth_problem),
    PairRule("run.cuda_graph", _cuda_graph_problem),
    PairRule("run.peer_timeout_s", _peer_problem),
)


def check_config(config: Config, subjects: Mapping[str, str] | None = None) -> None:
    """Check every value of a configuration.

    Args:
        config: the configuration, of any origin.
        subjects: what the message calls a key that the user gave, ``file.toml:3: data.limit`` or ``--data.limit``.

    Raises:
        InputError: the first value out of range: its key, what was expected and what came.
    """
    names = subjects or {}
    for rule in RULES:
        section, _, name = rule.path.partition(".")
        value = getattr(getattr(config, section), name)
        if not rule.test(value):
            raise InputError(f"{names.get(rule.path, rule.path)} must be {rule.words}, got {value!r}")
    for pair in PAIR_RULES:
        problem = pair.problem(config)
        if problem is not None:
            raise InputError(f"{names.get(pair.path, pair.path)} {problem}")
