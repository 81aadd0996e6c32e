"""Settings of a job, by configuration key: of one rank, of all ranks, and those that affect results.

    Config ──config_of_rank──> with this rank's device       ──common_settings──> equal on all ranks
    common_settings, data schema ──result_settings──> what a job and the checkpoint it resumes must have in common

A job can resume a checkpoint with different values of the settings that only affect speed, duration or paths.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bagpipe.checkpoint.manifest import DATA_COLUMNS
from bagpipe.config.pipeline_rules import costs_text
from bagpipe.config.sections import CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema
from bagpipe.util.redaction import redact
from trainer.orders import replay_hash

__all__ = [
    "changeable_settings",
    "check_labelled",
    "check_trained",
    "common_settings",
    "config_of_rank",
    "default_settings",
    "path_of_rank",
    "result_settings",
    "with_recorded",
]

_Section = TypeVar("_Section", DataConfig, ModelConfig, OptimConfig, RunConfig)

#: Keys that can differ between ranks: what a rank says and where, and secret files of a host.
_KEYS_OF_ONE_RANK = frozenset(
    {
        f"run.{name}"
        for name in ("trace", "tensorboard", "dir", "log", "log_format", "log_every_s", "trackers", "metrics")
    }
    | {f"cacher.{name}" for name in ("secret_file", "tls_ca", "tls_cert", "tls_key")}
    | {"store.password_file", "store.client"}
)
#: Sections whose keys affect results, except the keys in `_FREE`.
_SECTIONS = ("data", "model", "optim", "pipeline", "run")
#: Keys of these sections that only affect speed, duration or paths.
_FREE = frozenset(
    {
        "data.path",
        "data.eval_path",
        "data.test_path",
        "data.schema",
        "data.workers",
        "data.identity",
        "data.epochs",
        "data.follow",
        "data.follow_age_s",
        "data.stream_wait_s",
        "data.stream_idle_s",
        "data.until",
        "data.kafka_config",
        "optim.ema_evaluate",
        "optim.kfac_placement",
        "pipeline.in_flight",  # sums are in the order of micro-batches, whatever the order of actions
        "pipeline.plan",  # what it says is in other keys
        "pipeline.activation_bytes",
        "pipeline.activations",
        "pipeline.record",
        "pipeline.replay",
        "run.steps",
        "run.peer_timeout_s",
        "run.strict",
        "run.digest",
        "run.trace",
        "run.verify",
        "run.nonfinite",  # a job that failed on a bad batch can resume and skip it
    }
)
#: Keys that a resume may always change: checkpoints of earlier versions have values of them, but they change no bit.
_CHANGEABLE = ("pipeline.recompute", "pipeline.recompute_share")
#: Keys of other sections that affect results.
_EXTRA_KEYS = ("cacher.assign",)

#: Name of the setting that says which evaluations decide the learning rates.
_PLATEAU = "evaluations of a plateau schedule"


def config_of_rank(config: Config, membership: Membership | None) -> Config:
    """The configuration with this rank's device.

    Raises:
        InputError: several ranks with an in-memory store or with one device for all.
    """
    if membership is None:
        return config
    if config.store.url.startswith("memory:"):
        raise InputError(
            f"store.url is {redact(config.store.url)}, which is private to one process; "
            f"{membership.world_size} ranks need a server: leave store.url empty, or name a server"
        )
    device = config.run.device
    if device.startswith("cuda:"):
        raise InputError(f"run.device is {device}, but each of {membership.world_size} ranks needs its own: use cuda")
    if device == "cuda":
        device = f"cuda:{membership.local_rank}"
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, device=device))
    return config


def check_trained(config: Config) -> None:
    """Raise InputError if the examples are those of a job that only scores."""
    if config.data.scored:
        raise InputError("data.scored true is for eval and predict: training creates rows")
    check_labelled(config)


def check_labelled(config: Config) -> None:
    """Raise InputError if examples may lack their labels."""
    if config.data.unlabelled:
        raise InputError("data.unlabelled true is for predict: training and evaluation need labels")


def path_of_rank(path: str, rank: int) -> str:
    """``trace.json`` on rank 0, ``trace.rank2.json`` on rank 2; an empty path stays empty."""
    if not path or rank == 0:
        return path
    name = Path(path)
    return str(name.with_name(f"{name.stem}.rank{rank}{name.suffix}"))


def common_settings(config: Config) -> dict[str, Any]:
    """Settings that must be equal on every rank, by dotted key; JSON-able."""
    settings: dict[str, Any] = {}
    for section, values in dataclasses.asdict(config).items():
        for name, value in values.items():
            settings[f"{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    settings["run.device"] = config.run.device.partition(":")[0]
    settings["pipeline.costs"] = costs_text(config.pipeline)  # of a file, what it says: ranks must order alike
    settings["pipeline.replay"] = replay_hash(config.pipeline)
    if not config.pipeline.partial_shares:  # every backward is whole
        settings["pipeline.backward_shares"] = ""
    return {key: value for key, value in settings.items() if key not in _KEYS_OF_ONE_RANK}


def default_settings() -> dict[str, Any]:
    """Values of the settings that a checkpoint of an earlier version does not have."""
    return {**common_settings(Config()), _PLATEAU: _plateau_evaluations(Config())}


def changeable_settings(config: CheckpointConfig) -> tuple[str, ...]:
    """Names of the settings that a resume may change: those that `checkpoint.change` names, and what follows them.

    Each that does change is noted.
    """
    schedules = {"optim.schedule", "optim.rows_schedule"} & set(config.change)
    return (*config.change, *_CHANGEABLE, *((_PLATEAU,) if schedules else ()))


def result_settings(config: Config, data: DataSchema) -> dict[str, Any]:
    """Settings that affect results, by configuration key, and the columns of the data; JSON values."""
    everything = common_settings(config)
    keys = [key for key in everything if key.partition(".")[0] in _SECTIONS and key not in _FREE]
    chosen = {key: everything[key] for key in sorted([*keys, *_EXTRA_KEYS])}
    chosen[_PLATEAU] = _plateau_evaluations(config)
    # Tuples become lists, as in the manifest of a checkpoint.
    settings: dict[str, Any] = json.loads(json.dumps({**chosen, DATA_COLUMNS: data.to_json()}))
    return settings


def with_recorded(
    section: _Section, name: str, settings: Mapping[str, Any], keys: Collection[str] | None = None
) -> _Section:
    """A section of the configuration with the values that a checkpoint records.

    Args:
        section: has the values of the other keys.
        name: of the section.
        settings: of `result_settings`, maybe of another version: keys that the section does not have are left out.
        keys: names of the keys that are taken; None: all.
    """
    recorded: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        path = f"{name}.{field.name}"
        if path in settings and (keys is None or field.name in keys):
            value = settings[path]
            recorded[field.name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(section, **recorded)


def _plateau_evaluations(config: Config) -> str:
    """The evaluations that decide the learning rates, in words."""
    optim, held_out = config.optim, config.eval
    if "plateau" not in (optim.schedule, optim.row_shape):
        return "none"
    unit = f"{held_out.unit}s" if held_out.every > 1 else held_out.unit
    metric = f"{held_out.metric} by {held_out.group}" if held_out.metric == "gauc" else held_out.metric
    batches = f"{held_out.batches} batches" if held_out.batches else "all batches"
    averages = " with averaged weights" if optim.ema_evaluate else ""
    return f"{metric} of {batches} every {held_out.every} {unit}{averages}"
