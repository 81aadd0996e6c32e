"""Trials: training runs of the recommended setting and its neighbours, one process after the other.

recommended, the next smaller and larger cache, direct mode ──python -m trainer … --result, --run.trace──> Trial
                                          trace: the ends of two steps in the middle ──actions between──> Span

The trainer reads the replayed log, so their counts agree. Every run has its own store, or its own namespace if a store
is given.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bagpipe.config.sections import CheckpointConfig, Config, DataConfig, EvalConfig, OptimConfig
from bagpipe.util.documents import parse_json
from bagpipe.util.programs import module_environment, module_of
from bagpipe.util.temporary_folder import temporary_folder
from data.replay.options import Sweep
from data.replay.recommendation import setting_of
from data.replay.records import ReplayRecord, Setting, Span, Trial

__all__ = ["run_trial", "spans_of_step", "trainer_command", "trial_settings", "with_trials"]

#: Copied from the trainer's result.
RESULTS = (
    "steps",
    "step_s_p50",
    "samples_per_s",
    "exposed_embedding_s",
    "rows_fetched",
    "rows_written",
    "evictions_waiting",
    "hit_rate",
    "auc",
    "loss",
)

#: The measured ones among them, which also go into the records.
MEASURED = ("step_s_p50", "samples_per_s", "exposed_embedding_s")

#: The action that ends a step on its lane, with the batch's number.
_STEP_END = re.compile(r"\d+OPT(\d+)")


def trial_settings(recommended: Setting, records: Sequence[ReplayRecord]) -> tuple[Setting, ...]:
    """The recommended setting, its neighbours among the replayed cache sizes, and direct mode (no cache rows)."""
    sizes = sorted(
        record.cache_rows
        for record in records
        if record.error is None
        and (record.policy, record.lookahead, record.batch_size)
        == (recommended.policy, recommended.lookahead, recommended.batch_size)
    )
    position = sizes.index(recommended.cache_rows)
    neighbours = (*sizes[max(0, position - 1) : position], *sizes[position + 1 : position + 2])
    return tuple(dataclasses.replace(recommended, cache_rows=rows) for rows in (recommended.cache_rows, *neighbours, 0))


def run_trial(setting: Setting, sweep: Sweep) -> Trial:
    """Train once. A failed run returns a trial with its error."""
    named = dataclasses.asdict(setting)
    with temporary_folder("trial") as folder:
        result, trace = folder / "result.json", folder / "trace.json"
        code, told = _run(trainer_command(setting, sweep, result, trace))
        if code or not result.exists():
            return Trial(**named, error=_last_error(told, code))
        found: dict[str, Any] = parse_json(result.read_text(encoding="utf-8"))
        return Trial(
            **named,
            **{name: found[name] for name in RESULTS},
            step=spans_of_step(trace) if trace.exists() else (),
        )


def with_trials(records: Sequence[ReplayRecord], trials: Sequence[Trial]) -> tuple[ReplayRecord, ...]:
    """The records, with the measured times of those that were trained."""
    measured = {
        setting_of(trial): {name: getattr(trial, name) for name in MEASURED} for trial in trials if trial.error is None
    }
    return tuple(dataclasses.replace(record, **measured.get(setting_of(record), {})) for record in records)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of a process. On an interrupt, terminates the process and waits for it."""
    with subprocess.Popen(
        command,
        env=module_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _, told = process.communicate()
        except BaseException:
            process.terminate()
            process.communicate()
            raise
        return process.returncode, told


def spans_of_step(trace: Path) -> tuple[Span, ...]:
    """The actions during the middle step of a trace, clipped to it; empty if there are fewer than two steps.

    A step lasts from the end of the previous dense update to the end of its own. Waits are left out: they are the gaps.
    """
    ends = {
        int(match[1]): _stop(event)
        for event in _events(trace)
        if event["ph"] == "X" and (match := _STEP_END.fullmatch(event["name"]))
    }
    steps = sorted(batch for batch in ends if batch - 1 in ends)
    if not steps:
        return ()
    step = steps[len(steps) // 2]
    start, stop = ends[step - 1], ends[step]
    lanes: dict[int, str] = {}
    spans: list[Span] = []
    for event in _events(trace):
        if event["ph"] == "M" and event["name"] == "thread_name":
            lanes[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["cat"] == "action" and event["ts"] < stop and _stop(event) > start:
            spans.append(
                Span(
                    lane=lanes[event["tid"]],
                    name=event["name"],
                    start_s=(max(event["ts"], start) - start) / 1e6,
                    stop_s=(min(_stop(event), stop) - start) / 1e6,
                )
            )
    order = list(lanes.values())
    return tuple(sorted(spans, key=lambda span: (order.index(span.lane), span.start_s)))


def trainer_command(setting: Setting, sweep: Sweep, result: Path, trace: Path) -> list[str]:
    """The trainer's command line: the given configuration, then the trial's settings, since later flags win.

    The run does not resume and leaves no checkpoint, so keys that need one have no effect.
    """
    program = [sys.executable]
    if setting.world_size > 1:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(setting.world_size)]
        program += ["--log-dir", str(result.parent)]  # otherwise torchrun leaves an empty folder in $TMPDIR
    config = sweep.configs[0]
    values: dict[str, object] = {
        "data.eval_fraction": config.data.eval_fraction,
        "data.batch_size": setting.batch_size,
        "oracle.policy": setting.policy,
        "oracle.lookahead": setting.lookahead,
        "cache.rows": setting.cache_rows,
        "cache.max_rows": 0,
        "store.namespace": f"{config.store.namespace}.trial-{os.urandom(4).hex()}",
        **_without_checkpoints(config),
        "run.dir": "" if config.store.durability == "memory" else result.parent / "run",
        "run.tensorboard": "",
        "run.trace": trace,
    }
    flags = [f"--{key}={','.join(value) if isinstance(value, tuple) else value}" for key, value in values.items()]
    return [*program, "-m", module_of("trainer"), *sweep.trainer_flags, *flags, f"--result={result}"]


def _without_checkpoints(config: Config) -> dict[str, object]:
    """Values of the keys that need a checkpoint, or without held-out examples an evaluation: their defaults."""
    values: dict[str, object] = {"data.test_path": DataConfig.test_path, "eval.keep_best": EvalConfig.keep_best}
    sections: dict[str, type] = {"checkpoint": CheckpointConfig}
    if not config.data.has_evaluation:
        sections["eval"] = EvalConfig
        if config.optim.schedule == "plateau":
            values["optim.schedule"] = OptimConfig.schedule
    for name, kind in sections.items():
        values |= {f"{name}.{field.name}": field.default for field in dataclasses.fields(kind)}
    return values


def _last_error(text: str, code: int) -> str:
    """The program's own error line, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"the trainer ended with code {code}"])[-1].removeprefix("error: ")


def _events(trace: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace, one per line (`bagpipe.schedule.formats.spans`); never holds a long trace in memory."""
    with trace.open(encoding="utf-8") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text.startswith('{"ph"'):
                yield parse_json(text)


def _stop(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])
