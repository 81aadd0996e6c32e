from __future__ import annotations

from pathlib import Path

import torch

from bagpipe.progress import Progress
from trainer.progress import ProgressReporter


def test_progress_goes_to_tensorboard(tmp_path: Path) -> None:
    progress = Progress(
        steps=1, samples=10, loss_sum=torch.tensor(5.0), rows_unique=4, rows_inserted=1, rows_fetched=1,
        rows_written=0, elapsed_s=2.0, exposed_s=0.5,
    )  # fmt: skip
    with ProgressReporter(str(tmp_path)) as reporter:
        reporter(lambda: progress)
    assert progress.hit_rate == 0.75
    assert [path.name.startswith("events.out.tfevents") for path in tmp_path.iterdir()] == [True]
