from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bagpipe.training.progress import Progress
from trainer.progress import ProgressReporter

PROGRESS = Progress(
    steps=3, samples=10, loss_sum=torch.tensor(5.0), rows_unique=4, rows_inserted=1, rows_fetched=1,
    rows_written=0, elapsed_s=2.0, exposed_s=0.5, skipped_batches=2, loss_scale=512,
)  # fmt: skip


def scalars(folder: Path) -> dict[str, float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}


@pytest.mark.parametrize("shows_loss", [True, False])
def test_progress_goes_to_tensorboard(shows_loss: bool, tmp_path: Path) -> None:
    with ProgressReporter(str(tmp_path), shows_loss=shows_loss) as reporter:
        reporter(lambda: PROGRESS)
    found = scalars(tmp_path)
    assert found.pop("train/samples_per_s") > 0
    assert found == {
        **({"train/loss": 0.5} if shows_loss else {}),
        "cache/hit_rate": 0.75,
        "cache/exposed_share": 0.25,
        "store/rows_fetched": 1.0,
        "store/rows_written": 0.0,
        "train/skipped_batches": 2.0,
        "train/loss_scale": 512.0,
    }


@pytest.mark.parametrize(("shows_loss", "words"), [(True, "loss 0.5000, hits 75.0%"), (False, ", hits 75.0%")])
def test_the_progress_bar(shows_loss: bool, words: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ProgressReporter("", shows_loss=shows_loss) as reporter:
        reporter(lambda: PROGRESS)
    shown = capsys.readouterr().err
    assert words in shown
    assert ("loss" in shown) is shows_loss
