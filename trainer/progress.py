"""The progress bar and TensorBoard scalars of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from bagpipe.progress import Progress

__all__ = ["ProgressReporter"]

#: Reading the loss waits for the device, so it is read at most this often.
INTERVAL_S = 0.5


class ProgressReporter:
    """Shows samples/s, loss, hit rate and exposed embedding time; call it after every batch. The end is shown too.

    Args:
        tensorboard_dir: where scalars go; empty: none.
        label: what the bar begins with.
        shows_loss: False where other ranks compute losses: this one's sum says nothing then.
        samples: trained before this process began; totals go on from there.
    """

    def __init__(
        self, tensorboard_dir: str, label: str = "train", *, shows_loss: bool = True, samples: int = 0
    ) -> None:
        self._tensorboard_dir = tensorboard_dir
        self._label = label
        self._shows_loss = shows_loss
        self._bar: tqdm[Any] | None = None
        self._writer: Any = None
        self._last_s = 0.0
        self._last_samples = self._initial = samples
        self._totals: Callable[[], Progress] | None = None

    def __enter__(self) -> Self:
        self._bar = tqdm(
            unit=" samples",
            unit_scale=True,
            desc=self._label,
            disable=None,
            mininterval=INTERVAL_S,
            initial=self._initial,
        )
        if self._tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._tensorboard_dir)
        self._last_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._totals is not None and error is None:
            self._show(self._totals(), time.monotonic())
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def __call__(self, totals: Callable[[], Progress]) -> None:
        self._totals = totals
        now_s = time.monotonic()
        if now_s - self._last_s >= INTERVAL_S:
            self._show(totals(), now_s)

    def _show(self, progress: Progress, now_s: float) -> None:
        if self._bar is None or progress.samples == self._last_samples:
            return
        samples_per_s = (progress.samples - self._last_samples) / max(now_s - self._last_s, 1e-9)
        exposed = progress.exposed_s / progress.elapsed_s if progress.elapsed_s else 0.0
        self._bar.update(progress.samples - self._last_samples)
        scalars = {
            "train/samples_per_s": samples_per_s,
            "cache/hit_rate": progress.hit_rate,
            "cache/exposed_share": exposed,
            "store/rows_fetched": progress.rows_fetched,
            "store/rows_written": progress.rows_written,
        }
        words = [f"hits {progress.hit_rate:.1%}", f"exposed {exposed:.1%}"]
        if self._shows_loss:
            scalars["train/loss"] = loss = float(progress.loss_sum) / progress.samples
            words.insert(0, f"loss {loss:.4f}")
        self._bar.set_postfix_str(", ".join(words))
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, progress.steps)
        self._last_s, self._last_samples = now_s, progress.samples
