"""The schedule that the pipeline section asks for, and rules of the section's keys.

PipelineConfig ──configured_schedule──> DenseSchedule with the values of its own keys, such as the costs of zb-auto
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from bagpipe.config.sections import Config, PipelineConfig
from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.formats.cost_text import costs_of_json, costs_of_text
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.version_lags import VersionLags, version_lags
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, TRAINED_SCHEDULES, dense_schedule
from bagpipe.schedule.schedule import AsynchronousSchedule, DenseSchedule
from bagpipe.util.documents import file_text

__all__ = ["PIPELINE_PROBLEMS", "configured_schedule", "costs_text", "predicts_weights"]


def configured_schedule(pipeline: PipelineConfig) -> DenseSchedule:
    """The schedule of that name, with the section's values for its settings and costs.

    Raises:
        ScheduleError: there is no such schedule.
        InputError: the costs cannot be read.
    """
    return _configured(pipeline, _costs(pipeline))


def costs_text(pipeline: PipelineConfig) -> str:
    """The costs that decide the schedule's order, as text, whether given as text or in a file; empty: none.

    Raises:
        InputError: the costs cannot be read.
    """
    if pipeline.schedule not in TRAINED_SCHEDULES:
        return ""
    return ",".join(f"{key}={float(cost)!r}" for key, cost in sorted(_costs(pipeline).items()))


def predicts_weights(pipeline: PipelineConfig) -> bool:
    """Whether a forward or backward of the schedule has predicted weights."""
    return any(each.predicts_forward or each.predicts_backward for each in _lags(pipeline))


def _lags(pipeline: PipelineConfig) -> tuple[VersionLags, ...]:
    """The version lags of the stages; empty: the schedule is not asynchronous."""
    if pipeline.schedule not in ASYNCHRONOUS_SCHEDULES:
        return ()
    schedule = configured_schedule(pipeline)
    assert isinstance(schedule, AsynchronousSchedule), "listed as one"
    return tuple(version_lags(schedule.loop(chain(pipeline.stages, pipeline.microbatches))).values())


def _configured(pipeline: PipelineConfig, costs: Mapping[str, float]) -> DenseSchedule:
    schedule = dense_schedule(pipeline.schedule)
    given = {setting.name: getattr(pipeline, setting.name) for setting in schedule.settings}
    values: dict[str, Any] = {name: value for name, value in given.items() if value != ""}
    if schedule.uses_costs:
        values["costs"] = costs
    return schedule.configured(values)


def _costs(pipeline: PipelineConfig) -> dict[str, float]:
    """The costs, if the schedule uses any."""
    text = pipeline.costs
    if not dense_schedule(pipeline.schedule).uses_costs:
        return {}
    if not text.endswith(".json"):
        return costs_of_text(text, "pipeline.costs")
    return costs_of_json(file_text(text, subject="pipeline.costs"), f"pipeline.costs {text}")


def _stages_problem(config: Config) -> str | None:
    if config.pipeline.schedule != "none" or config.pipeline.stages == 1:
        return None
    return f"{config.pipeline.stages} needs pipeline.schedule, the name of a schedule, got none"


def _chunks_problem(config: Config) -> str | None:
    if config.pipeline.schedule != "none" or config.pipeline.chunks == 0:
        return None
    return f"{config.pipeline.chunks} needs pipeline.schedule, the name of a schedule, got none"


def _schedule_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if pipeline.schedule == "none" or pipeline.schedule.endswith(".csv"):
        return None
    if pipeline.schedule not in TRAINED_SCHEDULES:
        known = ", ".join(TRAINED_SCHEDULES)
        return f"must be one of none, {known}, or a .csv table of PyTorch's, got {pipeline.schedule!r}"
    if TRAINED_SCHEDULES[pipeline.schedule].uses_costs and not pipeline.costs:
        return f"{pipeline.schedule} needs pipeline.costs, measured durations of its stages, got none"
    try:
        refusal = _refusal(pipeline, tuple(_costs(pipeline).items()))
    except InputError as error:
        return f"{pipeline.schedule}: {error}"
    if refusal is None:
        return _asynchronous_problem(config)
    return f"{pipeline.schedule} does not allow these pipeline.stages, microbatches and chunks: {refusal}"


#: Dense optimizers whose weights can be predicted (`bagpipe.pipeline.stage.prediction`).
_PREDICTABLE = ("sgd", "adagrad", "adam", "adamw")


def _asynchronous_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if pipeline.schedule not in ASYNCHRONOUS_SCHEDULES:
        return None
    lags = _lags(pipeline)
    if any(each.predicts_forward or each.predicts_backward for each in lags) and config.optim.dense not in _PREDICTABLE:
        known = ", ".join(_PREDICTABLE)
        return f"{pipeline.schedule} predicts weights, which needs optim.dense {known}, got {config.optim.dense}"
    if config.run.autocast != "off" and not all(each.is_same for each in lags):
        return (
            f"{pipeline.schedule} is not possible with run.autocast {config.run.autocast}: backwards would use the "
            "rounded weights of their forwards"
        )
    return None


def _rows_delay_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if not pipeline.rows_delay:
        return None
    if pipeline.schedule not in ASYNCHRONOUS_SCHEDULES:
        return f"1 needs pipeline.schedule {' or '.join(ASYNCHRONOUS_SCHEDULES)}, got {pipeline.schedule}"
    if pipeline.microbatches < pipeline.stages - 1:
        return (
            f"1 needs pipeline.microbatches of at least {pipeline.stages - 1}, one less than the stages, got "
            f"{pipeline.microbatches}"
        )
    return None


def _plan_problem(config: Config) -> str | None:
    if not config.pipeline.plan or config.pipeline.schedule != "none":
        return None
    return f"{config.pipeline.plan} was not read: a program reads it with its command line"


def _replicas_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if not pipeline.replicas:
        return None
    if len(pipeline.stage_replicas) != pipeline.stages:
        return f"{pipeline.replicas} must be {pipeline.stages} numbers, one per stage (pipeline.stages)"
    schedule = TRAINED_SCHEDULES.get(pipeline.schedule)
    if schedule is None or schedule.num_pipes > 1 or schedule.chunks_or_default(pipeline.chunks or None) > 1:
        return (
            f"{pipeline.replicas} needs a pipeline.schedule of one direction and one stage per rank, such as 1f1b or "
            f"graph, got {pipeline.schedule}"
        )
    return None


def _stage_microbatches_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if not pipeline.stage_microbatches:
        return None
    if len(pipeline.micro_per_stage) != pipeline.stages:
        return f"{pipeline.stage_microbatches} must be {pipeline.stages} numbers, one per stage (pipeline.stages)"
    if pipeline.schedule != "graph":
        return f"{pipeline.stage_microbatches} needs pipeline.schedule graph, got {pipeline.schedule}"
    if max(pipeline.micro_per_stage) != pipeline.microbatches:
        return (
            f"{pipeline.stage_microbatches} needs pipeline.microbatches {max(pipeline.micro_per_stage)}, the most of "
            f"them, got {pipeline.microbatches}"
        )
    return None


@lru_cache(maxsize=256)  # zb-auto tries many orders, and a configuration is checked more than once
def _refusal(pipeline: PipelineConfig, costs: tuple[tuple[str, float], ...]) -> str | None:
    try:
        schedule = _configured(pipeline, dict(costs))
        schedule.build(chain(pipeline.stages, pipeline.microbatches), pipeline.chunks or None)
    except ScheduleError as error:
        return str(error)
    return None


def _costs_problem(config: Config) -> str | None:
    users = [schedule.name for schedule in TRAINED_SCHEDULES.values() if schedule.uses_costs]
    return _unused(config, "costs", users)


def _setting_problem(name: str) -> Callable[[Config], str | None]:
    return lambda config: _unused(config, name, _users(name))


@cache
def _users(name: str) -> tuple[str, ...]:
    """The schedules with a setting of that name."""
    schedules = TRAINED_SCHEDULES.values()
    return tuple(each.name for each in schedules if any(setting.name == name for setting in each.settings))


def _recompute_share_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    text = pipeline.recompute_share
    if not text:
        return None
    if not pipeline.is_staged:
        return f"{text} needs a pipeline.schedule, or pipeline.microbatches above 1, got none and 1"
    if pipeline.schedule in ASYNCHRONOUS_SCHEDULES:
        return f"{text} needs a synchronous pipeline.schedule: others keep weights by batch, got {pipeline.schedule}"
    if not pipeline.recompute and pipeline.schedule not in _users("recompute_share"):
        return f"{text} needs pipeline.recompute true, or pipeline.schedule 1f1b-shifted, got {pipeline.schedule}"
    count = text.count(",") + 1
    if count not in (1, pipeline.stages):
        return f"{text} must be 1 number or {pipeline.stages}, one per stage (pipeline.stages)"
    return None


def _activation_bytes_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if not pipeline.activation_bytes or pipeline.recompute_share == "auto":
        return None
    given = pipeline.recompute_share or "none"
    return f"{pipeline.activation_bytes} needs pipeline.recompute_share auto, got {given}"


def _activations_problem(config: Config) -> str | None:
    pipeline, where = config.pipeline, config.pipeline.activations
    if where == "device":
        return None
    if not pipeline.is_staged:
        return f"{where} needs a pipeline.schedule, or pipeline.microbatches above 1, got none and 1"
    if config.run.cuda_graph:
        return f"{where} is not possible with run.cuda_graph: a captured graph keeps the addresses of activations"
    return None


def _processes_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if pipeline.processes == "auto":
        return None
    if pipeline.schedule == "none":
        return "1 needs pipeline.schedule, the name of a schedule, got none"
    if pipeline.replicas:
        return f"1 is not possible with pipeline.replicas, which are ranks of each stage, got {pipeline.replicas}"
    return None


def _backward_shares_problem(config: Config) -> str | None:
    pipeline, text = config.pipeline, config.pipeline.backward_shares
    shares = [float(share) for share in text.split(",")] if text else [1.0]
    if min(shares) == 1:
        return None
    if pipeline.schedule == "none" or pipeline.stages < 2:
        return (
            f"{text} needs a pipeline.schedule and at least 2 pipeline.stages, got {pipeline.schedule} and "
            f"{pipeline.stages}"
        )
    if max(shares) * pipeline.stages <= pipeline.stages - 1:
        return (
            f"{text} never reach the first of {pipeline.stages} stages, which would not be trained: one of them must "
            f"be above {(pipeline.stages - 1) / pipeline.stages:.3g}"
        )
    if pipeline.stage_microbatches and pipeline.backward_unit == "microbatch":
        return f"{text} needs the same micro-batches in all stages, or pipeline.backward_unit rank"
    return None


def _backward_unit_problem(config: Config) -> str | None:
    pipeline = config.pipeline
    if pipeline.backward_unit == "microbatch" or pipeline.backward_shares:
        return None
    return f"{pipeline.backward_unit} needs pipeline.backward_shares, got none"


def _unused(config: Config, name: str, users: Sequence[str]) -> str | None:
    """The complaint about a key with a value that the schedule does not use."""
    value = getattr(config.pipeline, name)
    if value == getattr(PipelineConfig(), name) or config.pipeline.schedule in users:
        return None
    return f"{value} needs pipeline.schedule {' or '.join(users)}, got {config.pipeline.schedule}"


#: Key -> its problem.
PIPELINE_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "pipeline.stages": _stages_problem,
    "pipeline.chunks": _chunks_problem,
    "pipeline.schedule": _schedule_problem,
    "pipeline.plan": _plan_problem,
    "pipeline.replicas": _replicas_problem,
    "pipeline.stage_microbatches": _stage_microbatches_problem,
    "pipeline.costs": _costs_problem,
    "pipeline.memory": _setting_problem("memory"),
    "pipeline.recompute_share": _recompute_share_problem,
    "pipeline.activation_bytes": _activation_bytes_problem,
    "pipeline.activations": _activations_problem,
    "pipeline.processes": _processes_problem,
    "pipeline.backward_shares": _backward_shares_problem,
    "pipeline.backward_unit": _backward_unit_problem,
    "pipeline.rows_delay": _rows_delay_problem,
    "pipeline.prediction_offset": _setting_problem("prediction_offset"),
    "pipeline.in_flight": _setting_problem("in_flight"),
    "pipeline.record": lambda config: _unused(config, "record", ["dynamic"]),
    "pipeline.replay": lambda config: _unused(config, "replay", ["dynamic"]),
}
