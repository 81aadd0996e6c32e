from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bagpipe.config.keys import config_keys
from bagpipe.config.sections import Config, RunConfig, StoreConfig
from bagpipe.errors import InputError
from tests.trainer.observe.small import interval
from trainer.observe.events import Event
from trainer.observe.trackers import TRACKERS, TrackerSink, open_tracker

EVALUATION = Event(kind="evaluation", elapsed_s=3.0, step=3, values={"auc": 0.75, "left_out": {"ne": "why"}})

#: Packages that record the calls of a tracker.
STUBS = {
    "wandb": """
calls = []
class Run:
    def log(self, values, step): calls.append(("log", step, values))
    def finish(self, exit_code): calls.append(("finish", exit_code))
def init(config, force):
    calls.append(("init", config, force))
    return Run()
""",
    "mlflow": """
calls = []
def start_run(): calls.append(("start_run",))
def log_params(params): calls.append(("log_params", params))
def log_metrics(metrics, step, synchronous): calls.append(("log", step, metrics))
def flush_async_logging(): calls.append(("flush",))
def end_run(status): calls.append(("end_run", status))
""",
}


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages on the search path; forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in STUBS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in STUBS:
        sys.modules.pop(name, None)


def track(name: str, config: Config, *, failed: bool = False) -> None:
    sink = TrackerSink(open_tracker(name, config), 0.5)
    for event in (Event(kind="phase", elapsed_s=0, values={"phase": "training"}), interval(), EVALUATION):
        sink.take(event)
    sink.close(failed=failed)


#: Values that a tracker gets of the interval and the evaluation above.
EXPECTED = {
    "train/samples_per_s": 5.0,
    "train/loss": 0.5,
    "train/interval_loss": 0.5,
    "train/skipped_batches": 2.0,
    "train/loss_scale": 512.0,
    "train/dense_lr": 0.5,
    "train/rows_lr": 0.25,
    "train/rows_lr/user": 0.125,
    "train/grad_norm": 1.5,
    "cache/hit_rate": 0.75,
    "cache/interval_hit_rate": 0.75,
    "cache/exposed_share": 0.25,
    "cache/interval_exposed_share": 0.25,
    "store/rows_fetched": 1.0,
    "store/rows_written": 0.0,
    "cache/evictions_waiting": 3.0,
}


def test_scalars_of_tensorboard(tmp_path: Path) -> None:
    track("tensorboard", Config(run=RunConfig(tensorboard=str(tmp_path))))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {name: event for name in events.Tags()["scalars"] for event in events.Scalars(name)}
    assert {name: event.value for name, event in found.items()} == {**EXPECTED, "eval/auc": 0.75}
    assert {event.step for event in found.values()} == {3}


def test_calls_of_wandb(stubs: Path) -> None:
    (stubs / "wandb.py").write_text(STUBS["wandb"])
    config = Config(store=StoreConfig(url="redis://user:secret@host:1"))
    track("wandb", config, failed=True)
    calls: list[Any] = sys.modules["wandb"].calls
    name, settings, force = calls[0]
    assert (name, force) == ("init", True)
    assert (settings["store.url"], settings["run.trackers"]) == ("redis://user:***@host:1", [])
    assert calls[1:] == [("log", 3, EXPECTED), ("log", 3, {"eval/auc": 0.75}), ("finish", 1)]


def test_calls_of_mlflow(stubs: Path) -> None:
    (stubs / "mlflow.py").write_text(STUBS["mlflow"])
    track("mlflow", Config())
    calls: list[Any] = sys.modules["mlflow"].calls
    params = [call[1] for call in calls if call[0] == "log_params"]
    assert max(map(len, params)) <= 100
    assert {key for some in params for key in some} == {key.path for key in config_keys()}
    assert [call for call in calls if call[0] != "log_params"] == [
        ("start_run",), ("log", 3, EXPECTED), ("log", 3, {"eval/auc": 0.75}), ("flush",), ("end_run", "FINISHED"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line(name: str, stubs: Path) -> None:
    (stubs / f"{name}.py").write_text("raise ModuleNotFoundError('No module named x')")
    with pytest.raises(InputError) as caught:
        open_tracker(name, Config())
    assert str(caught.value) == (
        f"run.trackers: {name} needs the package {name}: pip install {name} (No module named x)"
    )


def test_a_tracker_that_does_not_start_is_one_line(stubs: Path) -> None:
    (stubs / "wandb.py").write_text("def init(**_):\n    raise RuntimeError('No API key\\nconfigured')")
    with pytest.raises(InputError, match=r"run\.trackers: wandb does not start: RuntimeError: No API key configured"):
        open_tracker("wandb", Config())


def test_every_tracker_has_a_name() -> None:
    assert set(TRACKERS) == {"tensorboard", "wandb", "mlflow"}
