"""The progress bar and TensorBoard scalars of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.pipeline.stream import NullStreams, Streams
from bagpipe.training.progress import Progress

__all__ = ["ProgressReporter"]

#: How often it is shown, at most.
INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Loss:
    """A sum of losses on its way to the host, and the examples it is of."""

    loss_sum: PendingTensor
    samples: int


class ProgressReporter:
    """Shows samples/s, loss, hit rate and exposed embedding time; call it after every batch. The end is shown too.

    Args:
        tensorboard_dir: where scalars go; empty: none.
        label: what the bar begins with.
        shows_loss: False where other ranks compute losses: this one's sum says nothing then.
        samples: trained before this process began; totals go on from there.
        streams: of the model's device. From a device the loss comes when it comes: it is that of some batches before,
            so that no batch waits for it. The last one is exact.
    """

    def __init__(
        self,
        tensorboard_dir: str,
        label: str = "train",
        *,
        shows_loss: bool = True,
        samples: int = 0,
        streams: Streams | None = None,
    ) -> None:
        self._tensorboard_dir = tensorboard_dir
        self._label = label
        self._shows_loss = shows_loss
        self._bar: tqdm[Any] | None = None
        self._writer: Any = None
        self._last_s = 0.0
        self._last_samples = self._initial = samples
        self._totals: Callable[[], Progress] | None = None
        self._streams = NullStreams() if streams is None else streams
        self._asked: _Loss | None = None
        self._loss: float | None = None

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
            progress = self._totals()
            self._asked = None
            self._ask(progress)
            self._look(waits=True)
            self._show(progress, time.monotonic())
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def __call__(self, totals: Callable[[], Progress]) -> None:
        self._totals = totals
        now_s = time.monotonic()
        if now_s - self._last_s >= INTERVAL_S:
            progress = totals()
            self._ask(progress)
            self._look()
            self._show(progress, now_s)

    def _ask(self, progress: Progress) -> None:
        """Have the loss brought to the host, unless one is on its way."""
        if self._shows_loss and self._asked is None and progress.samples:
            self._asked = _Loss(to_host(self._streams, progress.loss_sum), progress.samples)

    def _look(self, *, waits: bool = False) -> None:
        """Take the loss that has come."""
        asked = self._asked
        if asked is not None and (waits or asked.loss_sum.is_ready()):
            self._loss, self._asked = float(asked.loss_sum.get()) / asked.samples, None

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
            "train/skipped_batches": progress.skipped_batches,
            "train/loss_scale": progress.loss_scale,
        }
        words = [f"hits {progress.hit_rate:.1%}", f"exposed {exposed:.1%}"]
        if self._loss is not None:
            scalars["train/loss"] = self._loss
            words.insert(0, f"loss {self._loss:.4f}")
        self._bar.set_postfix_str(", ".join(words))
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, progress.steps)
        self._last_s, self._last_samples = now_s, progress.samples
