from __future__ import annotations

import pytest

from tests.trainer.observe.small import interval
from trainer.observe.bar import Bar
from trainer.observe.events import Event


def test_the_bar_shows_phases_and_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(0.5, "rank 0 of 2")
    bar.take(Event(kind="phase", elapsed_s=0.0, values={"phase": "building the model"}))
    bar.take(Event(kind="phase", elapsed_s=0.0, step=1, values={"phase": "training", "samples": 4}))
    bar.take(interval())
    bar.take(Event(kind="evaluation", elapsed_s=3.0, step=3, values={"auc": 0.75}))
    bar.take(Event(kind="end", elapsed_s=4.0))
    bar.close(failed=False)
    shown = capsys.readouterr().err
    assert "rank 0 of 2: building the model" in shown
    assert "rank 0 of 2: training: 4.00 samples" in shown
    assert "10.0 samples" in shown
    assert "step 3, loss 0.50000, grad norm 1.5, hits 75.0%, exposed 25.0%, 2 batches skipped, ETA 0:00:04" in shown
    assert "[     3.0 s] evaluation at step 3  AUC 0.75000\n" in shown
