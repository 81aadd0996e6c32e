"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow. `TRACKERS` opens a `Tracker` by its name.

    Event: interval, evaluation ──TrackerSink──> {name: number} ──> Tracker.log(step, values)

A tracker's own environment variables say where it writes and who logs in (WANDB_MODE, WANDB_PROJECT,
MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, …). Passwords in URLs of the configuration are not sent.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.util.redaction import redact
from trainer.metrics import METRICS, by_label
from trainer.observe.events import Event

__all__ = ["TRACKERS", "Tracker", "TrackerSink", "open_tracker"]

#: Values of an interval -> their names in trackers.
_SCALARS: Mapping[str, str] = {
    "samples_per_s": "train/samples_per_s",
    "loss": "train/loss",
    "interval_loss": "train/interval_loss",
    "skipped_batches": "train/skipped_batches",
    "loss_scale": "train/loss_scale",
    "grad_norm": "train/grad_norm",
    "dense_lr": "train/dense_lr",
    "rows_lr": "train/rows_lr",
    "hit_rate": "cache/hit_rate",
    "interval_hit_rate": "cache/interval_hit_rate",
    "exposed_share": "cache/exposed_share",
    "interval_exposed_share": "cache/interval_exposed_share",
    "rows_fetched": "store/rows_fetched",
    "rows_written": "store/rows_written",
    "evictions_waiting": "cache/evictions_waiting",
}


#: Parameters of one request to MLflow's server, at most (its REST API, "Request Limits").
_MLFLOW_PARAMS = 100


class Tracker(Protocol):
    """Keeps numbers of a run by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name after so many steps."""

    def close(self, *, failed: bool) -> None:
        """The run is over. `failed`: by an error."""


class TrackerSink:
    """Gives the numbers of intervals and evaluations to a tracker.

    Args:
        tracker: open; closed with the sink.
        every_s: time between two intervals.
    """

    def __init__(self, tracker: Tracker, every_s: float) -> None:
        self.every_s = every_s
        self._tracker = tracker

    def take(self, event: Event) -> None:
        values = event.values
        if event.kind == "interval":
            named = {name: values[key] for key, name in _SCALARS.items() if values.get(key) is not None}
            named |= {f"train/rows_lr/{table}": rate for table, rate in values.get("rows_lr_by_table", {}).items()}
        elif event.kind == "evaluation":
            named = {f"eval/{name}": values[name] for name in METRICS if name in values}
            for label, found in by_label(values).items():
                named |= {f"eval/{label}/{name}": value for name, value in found.items()} if label else {}
        else:
            return
        self._tracker.log(event.step or 0, named)

    def close(self, *, failed: bool) -> None:
        self._tracker.close(failed=failed)


class _TensorBoard:
    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(config.run.tensorboard)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, config: Config) -> None:
        wandb = _package("wandb")
        self._run = wandb.init(config=_settings(config), force=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    def __init__(self, config: Config) -> None:
        self._mlflow = _package("mlflow")
        self._mlflow.start_run()
        settings = list(_settings(config).items())
        for start in range(0, len(settings), _MLFLOW_PARAMS):
            self._mlflow.log_params(dict(settings[start : start + _MLFLOW_PARAMS]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # In a thread of MLflow's: its server may be slow.
        self._mlflow.log_metrics(dict(values), step=step, synchronous=False)

    def close(self, *, failed: bool) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


#: By name in `run.trackers`.
TRACKERS: Mapping[str, Callable[[Config], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def open_tracker(name: str, config: Config) -> Tracker:
    """Open a tracker before training.

    Raises:
        InputError: its package is missing, or it does not start (nobody is logged in, its server is away).
    """
    try:
        return TRACKERS[name](config)
    except InputError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise InputError(f"run.trackers: {name} does not start: {type(error).__name__}: {text}") from error


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"run.trackers: {name} needs the package {name}: pip install {name} ({error})") from None


def _settings(config: Config) -> dict[str, Any]:
    """Settings by configuration key, without the passwords of URLs."""
    found: dict[str, Any] = {}
    for section, values in dataclasses.asdict(config).items():
        for key, value in values.items():
            plain = list(value) if isinstance(value, tuple) else value
            found[f"{section}.{key}"] = redact(plain) if isinstance(plain, str) else plain
    return found
