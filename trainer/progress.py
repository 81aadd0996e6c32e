"""Progress bar and TensorBoard scalars of a run."""

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

#: Shortest interval between two updates.
INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Loss:
    """A loss sum in transfer to the host, and its number of examples."""

    loss_sum: PendingTensor
    samples: int


class ProgressReporter:
    """Shows samples/s, loss, hit rate and exposed embedding time. Called after every batch; also shows the final state.

    Args:
        tensorboard_dir: folder for scalars; empty: none.
        label: label of the progress bar.
        shows_loss: False if other ranks compute losses, so that this rank's sum is incomplete.
        samples: examples trained before this process started; totals include them.
        streams: streams of the model's device. The loss is copied from the device asynchronously and lags by some
            batches, so that no batch waits for it. The final loss is exact.
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
        self._pending_loss: _Loss | None = None
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
            self._pending_loss = None
            self._request_loss(progress)
            self._read_loss(waits=True)
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
            self._request_loss(progress)
            self._read_loss()
            self._show(progress, now_s)

    def _request_loss(self, progress: Progress) -> None:
        """Start copying the loss to the host, unless a copy is in progress."""
        if self._shows_loss and self._pending_loss is None and progress.samples:
            self._pending_loss = _Loss(to_host(self._streams, progress.loss_sum), progress.samples)

    def _read_loss(self, *, waits: bool = False) -> None:
        """Read the pending loss if the copy is done; with `waits`, wait for it."""
        pending = self._pending_loss
        if pending is not None and (waits or pending.loss_sum.is_ready()):
            self._loss, self._pending_loss = float(pending.loss_sum.get()) / pending.samples, None

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
