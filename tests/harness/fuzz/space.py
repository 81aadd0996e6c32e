"""The values of every configuration key: of the job, of a twin, set by the harness, or not drawn and why.

JOB    decide the results; equal in all twins of a draw; drawn group by group
MODEL  like JOB, of some models
TWIN   must not change a result; drawn for every twin
SET    computed: paths, addresses, the cache of a twin
LEFT   not drawn, with the reason
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from functools import cache
from random import Random

from bagpipe.config.keys import Given, Key, config_keys, convert, section_type
from bagpipe.config.rules import RULES, check_config
from bagpipe.config.sections import Config, Metric
from bagpipe.schedule.registry import TRAINED_SCHEDULES

__all__ = ["JOB", "LEFT", "MODEL", "SET", "TWIN", "Values", "choices_of", "config_of", "draw_value", "rules_beside"]

#: Values as written in a flag, with their weights.
Values = Mapping[str, float]


@cache
def choices_of(path: str) -> tuple[str, ...]:
    """The values of an enumerated key (`Literal` or bool) as flags; empty for other keys."""
    section, _, name = path.partition(".")
    return _choices(typing.get_type_hints(section_type(section))[name])


def _choices(hint: object) -> tuple[str, ...]:
    if hint is bool:
        return ("false", "true")
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) is typing.Union:
        parts = [_choices(part) for part in typing.get_args(hint)]
        return tuple(choice for part in parts for choice in part) if all(parts) else ()
    return ()


def _even(path: str, **weights: float) -> Values:
    """All values of an enumerated key, each with weight 1 unless given; 0: never drawn."""
    found = {choice: weights.get(choice.replace("-", "_"), 1.0) for choice in choices_of(path)}
    return {choice: weight for choice, weight in found.items() if weight}


#: Groups of keys in the order in which they are drawn. A group is drawn again until the rules accept it.
JOB: tuple[Mapping[str, Values], ...] = (
    {
        "run.dtype": {"float32": 3, "float64": 2},
        "cache.dtype": _even("cache.dtype", run=4),
        "cache.rounding": _even("cache.rounding"),
    },
    {
        "pipeline.schedule": {
            "none": 5.0 * len(TRAINED_SCHEDULES),
            **dict.fromkeys(TRAINED_SCHEDULES, 1.0),
            "zb-auto": 3.0,  # it needs costs, which no other schedule takes
            "dualpipe-v": 3.0,  # it needs as many micro-batches as stages
            "dynamic": 3.0,  # it has a limit of its own
            "1f1b-shifted": 6.0,  # it needs four micro-batches
        },
        "pipeline.costs": {"": 6, "F=1,I=1,W=1": 1, "0F=3,F=1,I=1.5,W=1,B=2": 1},
        "pipeline.memory": {"": 2, "2": 1},
        "pipeline.prediction_offset": {"0": 4, "1": 1, "-1": 1},
        "pipeline.in_flight": {"0": 4, "1": 1, "3": 1},
        "pipeline.stages": {"1": 2, "2": 4, "3": 1, "4": 2},
        "pipeline.microbatches": {"1": 6, "2": 2, "3": 1, "4": 2},
        "pipeline.chunks": {"0": 20, "1": 1, "2": 1},
    },
    {"pipeline.replicas": {"": 6, "1,1": 2, "2,1": 2, "1,2": 2, "2,2": 0.5}},  # of two stages
    {"pipeline.rows_delay": {"0": 1, "1": 1}},
    {
        "pipeline.processes": _even("pipeline.processes", auto=4),
        "pipeline.backward_shares": {"": 4, "0.5,1": 1, "1,0,0.25": 1},
        "pipeline.backward_unit": _even("pipeline.backward_unit", microbatch=2),
    },
    {
        "run.nonfinite": _even("run.nonfinite", skip=2),
        "run.autocast": _even("run.autocast", off=3),
        "run.loss_scale": {"0": 6, "1": 1, "1024": 1, "65536": 1, "16777216": 0.3},
        "run.loss_scale_growth_interval": {"0": 2, "1": 1, "3": 1},
    },
    {
        "optim.rows": _even("optim.rows"),
        "optim.rows_weight_decay": {"0": 3, "0.01": 1, "0.3": 1},
        "optim.rows_decay_kind": _even("optim.rows_decay_kind"),
        "optim.rows_momentum": {"0.9": 4, "0.5": 1},
        "optim.ftrl_beta": {"1": 4, "0": 1},
        "optim.ftrl_l1": {"0": 4, "0.01": 1},
        "optim.ftrl_l2": {"0": 4, "0.1": 1},
        "optim.rows_lr": {"0.02": 2, "0.1": 2, "1": 1, "1e-6": 1},
        "optim.dense": _even("optim.dense"),
        "optim.dense_lr": {"0.02": 2, "0.05": 2, "0.5": 1},
        "optim.eps": {"1e-8": 2, "1e-6": 2, "1e-2": 1, "1e-20": 0.3},
        "optim.momentum": {"0": 6, "0.9": 1},
        "optim.nesterov": _even("optim.nesterov", false=6),
        "optim.beta1": {"0.9": 6, "0.5": 1},
        "optim.beta2": {"0.999": 6, "0.9": 1},
        "optim.weight_decay": {"0": 2, "0.01": 1},
        "optim.weight_decay_exempt": {"": 3, "1d": 1},
        "optim.clip_norm": {"0": 4, "0.005": 1, "0.1": 1},
        "optim.clip_scope": _even("optim.clip_scope"),
        "optim.clip_value": {"0": 3, "0.001": 1},
        "optim.ema_decay": {"0": 3, "0.5": 1, "0.999": 1},
        "optim.ema_evaluate": _even("optim.ema_evaluate"),
    },
    {
        "optim.precondition": _even("optim.precondition", none=4),
        "optim.kfac_factors": _even("optim.kfac_factors"),
        "optim.kfac_decay": {"0.95": 3, "0.5": 1},
        "optim.kfac_damping": {"0.003": 2, "0.1": 2, "1": 1},
        "optim.kfac_kappa": {"0.001": 3, "0": 1, "1e-6": 1},
        "optim.kfac_factor_every": {"1": 3, "2": 1},
        "optim.kfac_inverse_every": {"10": 2, "1": 2, "3": 1},
        "optim.kfac_lag": {"0": 2, "1": 1},
        "optim.kfac_placement": _even("optim.kfac_placement", bubbles=2),
    },
    {
        "data.batch_size": {"1": 0.3, "2": 0.6, "5": 2, "8": 3, "12": 3, "16": 2, "33": 0.5, "64": 0.3},
        "data.epochs": {"1": 3, "2": 1, "3": 0.5},
        "data.eval_fraction": {"0": 2, "0.1": 1, "0.3": 1},
        "data.shuffle": _even("data.shuffle"),
        "data.shuffle_buffer": {"0": 3, "30": 1, "1000": 1},
        "data.bad_rows": _even("data.bad_rows"),
        "run.steps": {"0": 5, "1": 0.3, "7": 1},
    },
    {
        "data.min_uses": {"1": 40, "2": 1, "3": 1},
        "data.default_row": _even("data.default_row"),
        "data.use_counts": _even("data.use_counts"),
        "data.sketch_cells": {"1048576": 4, "16": 1},
        "data.expire_after": {"0": 40, "2": 1, "6": 1, "40": 1},
        "data.expire_unit": _even("data.expire_unit"),
        "data.expire_every": {"1000": 4, "1": 1, "3": 1},
    },
    {
        "eval.every": {"0": 4, "1": 1, "2": 1, "3": 1, "5": 1},
        "eval.unit": _even("eval.unit", step=4),
        "eval.batches": {"0": 2, "1": 1},
        "eval.metric": dict.fromkeys(typing.get_args(Metric), 1.0),
        "eval.patience": {"0": 4, "1": 1, "2": 1},
        "eval.min_delta": {"0": 2, "0.01": 1},
    },
    {
        "optim.schedule": _even("optim.schedule", plateau=2),
        "optim.rows_schedule": _even("optim.rows_schedule", same=3),
        "optim.schedule_unit": _even("optim.schedule_unit"),
        "optim.schedule_length": {"0": 3, "3": 1, "20": 1},
        "optim.schedule_every": {"0": 3, "1": 1, "5": 1},
        "optim.schedule_milestones": {"": 5, "2,7": 1},
        "optim.schedule_factor": {"0.1": 3, "0.7": 2},
        "optim.schedule_power": {"1": 3, "2": 2},
        "optim.schedule_floor": {"0": 3, "0.05": 2},
        "optim.schedule_patience": {"10": 4, "0": 1, "1": 1},
        "optim.schedule_threshold": {"0.0001": 4, "0": 1, "0.05": 1},
        "optim.schedule_cooldown": {"0": 4, "1": 1},
    },
    {
        "optim.warmup_steps": {"0": 2, "1": 1, "6": 1},
        "optim.warmup_start": {"0": 2, "0.3": 1},
        "optim.rows_warmup_steps": {"0": 4, "4": 1},
    },
    {
        "model.embedding_dim": {"1": 1, "3": 1, "4": 3, "8": 1, "16": 0.5},
        "model.bottom_mlp": {"6": 3, "8,5": 1, "20,12": 0.5},
        "model.top_mlp": {"5": 3, "7,4": 1, "40,9": 0.5},
    },
    {
        "model.loss": _even("model.loss", bce=2),
        "model.label_smoothing": {"0": 3, "0.1": 1},
        "model.pos_weight": {"1": 3, "5": 1},
        "model.focal_gamma": {"2": 3, "0": 1, "1.5": 1},
        "model.focal_alpha": {"0.25": 3, "0": 1},
    },
    {
        "cacher.assign": _even("cacher.assign"),
        "run.seed": {"0": 1, "1": 1, "9223372036854775807": 1},
        "run.threads": {"1": 5, "2": 1},
        "run.kernels": {"auto": 1, "torch": 1},
    },
)

#: Keys of some models, drawn once the model is; a model without the key has its default.
MODEL: Mapping[str, Values] = {
    "model.dropout": {"0": 3, "0.1": 1, "0.5": 1},
    "model.batch_norm": _even("model.batch_norm", false=3),
    "model.cross_layers": {"3": 2, "1": 1},
    "model.structure": _even("model.structure"),
    "model.heads": {"1": 3, "2": 1, "4": 1},
    "model.gate_mlp": {"": 2, "3": 1, "4,2": 1},
    "model.experts": {"4": 2, "1": 1},
    "model.task_experts": {"2": 2, "1": 1},
    "model.levels": {"2": 2, "1": 1},
}

TWIN: Mapping[str, Values] = {
    "data.workers": {"0": 6, "1": 1, "2": 1},
    "data.identity": _even("data.identity"),
    "oracle.lookahead": {"1": 1, "2": 1, "4": 1, "8": 2, "32": 1, "200": 1},
    "oracle.policy": _even("oracle.policy"),
    "oracle.horizon": _even("oracle.horizon"),
    "cache.prefetch_depth": {"1": 2, "2": 1, "4": 2, "9": 1},
    "store.buckets": {"1": 1, "2": 1, "8": 2, "64": 1},
    "store.existing": _even("store.existing", refuse=3),
    "store.audit": _even("store.audit"),
    "store.durability": _even("store.durability", memory=4),
    "store.client": _even("store.client", thread=2),
    "checkpoint.every": {"0": 1, "1": 1, "2": 2, "3": 2, "5": 2, "9": 1},
    "checkpoint.keep": {"1": 2, "2": 2, "3": 1},
    "checkpoint.full_every": {"1": 1, "2": 1, "3": 1, "16": 1},
    "run.log_format": _even("run.log_format"),
    "run.log_every_s": {"10": 2, "0.01": 1},
    "run.strict": _even("run.strict"),
    "checkpoint.take_over": _even("checkpoint.take_over", false=3),
    "eval.keep_best": _even("eval.keep_best"),  # of twins with checkpoints
    # as large as any drawn model needs; state on the host moves chunks all the same
    "dense.budget_bytes": {"0": 3, "64000000": 1},
    "dense.chunk_bytes": {"0": 3, "4000000": 1},
    "dense.state": _even("dense.state"),
    "pipeline.recompute": _even("pipeline.recompute", false=2),
    "pipeline.recompute_share": {"": 2, "1": 1, "0.5": 1, "0.5,0": 1, "auto": 2},
    "pipeline.activation_bytes": {"0": 3, "10000000": 1},
    "pipeline.activations": _even("pipeline.activations"),
    "dense.shard": _even("dense.shard"),  # of several ranks
    "dense.wrap": {"": 2, "*": 1},
}

#: Drawn or computed outside these tables.
SET = frozenset(
    {
        "data.path", "data.format", "data.schema", "data.limit", "model.name", "model.factory", "cache.rows",
        "cache.max_rows",
        "store.url", "store.namespace", "cacher.url", "checkpoint.dir", "checkpoint.resume", "run.dir", "run.trace",
        "run.peer_timeout_s", "eval.group", "optim.rows_by_table", "optim.rows_lr_by_table", "model.loss_weights",
        "data.min_uses_by_table", "data.expire_after_by_table", "data.follow", "data.follow_age_s",
        "data.stream_wait_s", "data.stream_idle_s", "checkpoint.start_from", "checkpoint.start_without",
    }
)  # fmt: skip

LEFT: Mapping[str, str] = {
    "checkpoint.change": "all starts of a draw have the same settings",
    "checkpoint.mirror": "needs an object store",
    "cacher.shards": "more processes, and data with fewer tables refuses them: tests/cacher compares their batches",
    "cacher.shard_tables": "names tables of one data set",
    "cacher.secret_file": "of cachers on a network",
    "store.password_file": "of servers with a password",
    "cacher.tls_ca": "of cachers on a network",
    "cacher.tls_cert": "of cachers on a network",
    "cacher.tls_key": "of cachers on a network",
    "cacher.timeout_s": "a deadline",
    "store.timeout_s": "a deadline",
    "data.unlabelled": "refused in training",
    "data.scored": "refused in training",
    "data.eval_path": "the same code reads it as data.path",
    "data.test_path": "scored from a checkpoint after training, as the command eval does",
    "data.until": "a time of the clock",
    "data.kafka_run": "of a topic: tests/system/test_streams.py",
    "data.kafka_config": "of a topic",
    "pipeline.partition": "names modules of one model",
    "pipeline.plan": "names modules of one model",
    "pipeline.stage_microbatches": "of graph, one number per stage",
    "pipeline.record": "of dynamic, whose order changes no bit",
    "pipeline.replay": "repeats a file of another job",
    "model.first_gate": "names columns of one data set",
    "model.second_gate": "names columns of one data set",
    "run.device": "the machine's",
    "run.digest": "the digests are what twins are compared by",
    "run.verify": "makes a second reference of the batches, where a draw has its twins; an axis of --pairs",
    "run.compile": "half a minute a start; an axis of --pairs",
    "run.cuda_graph": "needs a CUDA device",
    "run.tensorboard": "its writer takes seconds to import",
    "run.trackers": "packages that the programs do not need",
    "run.log": "the file of one process",
    "run.metrics": "a port of the machine",
}


#: The rules, those first that refused values last: the same few refuse most draws.
_LATEST_FIRST = list(RULES)


def draw_value(rng: Random, values: Values) -> str:
    """One value, by weight."""
    return rng.choices(list(values), weights=list(values.values()))[0]


def config_of(settings: Mapping[str, str]) -> Config:
    """The checked configuration of values by key path.

    Raises:
        InputError: a rule refuses it.
    """
    config = _unchecked(settings)
    check_config(config)
    return config


def rules_beside(settings: Mapping[str, str]) -> Callable[[Mapping[str, str]], bool]:
    """Whether the rules accept these settings beside others, whose values are in their ranges, as a function of the
    others.

    Faster than `config_of`: only sections of the others are made anew.
    """
    fixed = _by_section(settings)
    sections = {name: section_type(name)(**values) for name, values in fixed.items()}

    def accept(others: Mapping[str, str]) -> bool:
        drawn = {name: {**fixed.get(name, {}), **values} for name, values in _by_section(others).items()}
        changed = {name: section_type(name)(**values) for name, values in drawn.items()}
        return _is_accepted(Config(**{**sections, **changed}))

    return accept


def _is_accepted(config: Config) -> bool:
    for place, rule in enumerate(_LATEST_FIRST):
        if rule.problem(config) is not None:
            _LATEST_FIRST.insert(0, _LATEST_FIRST.pop(place))
            return False
    return True


def _unchecked(settings: Mapping[str, str]) -> Config:
    return Config(**{name: section_type(name)(**values) for name, values in _by_section(settings).items()})


def _by_section(settings: Mapping[str, str]) -> dict[str, dict[str, object]]:
    sections: dict[str, dict[str, object]] = {}
    for path, text in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = _value(path, text)
    return sections


@cache
def _value(path: str, text: str) -> object:
    return convert(_keys()[path], Given(value=text, subject=path))


@cache
def _keys() -> dict[str, Key]:
    return {key.path: key for key in config_keys()}
