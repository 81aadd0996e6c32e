"""`Meter`: from totals of a run to the values of an interval. Times in seconds, rates per second.

Progress so far, Progress of the interval before ──> totals, and ``interval_`` values of what came since
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagpipe.config.sections import Config
from bagpipe.pipeline.report import LaneReport
from bagpipe.training.progress import Progress
from trainer.observe.waits import waited_for

__all__ = ["LossSoFar", "Meter", "planned_steps"]

#: A share of waits below this is not worth a reason.
_WORTH_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSoFar:
    """A loss sum that has come to the host, its examples, and the norm of the last ones' gradients; None: not known."""

    loss_sum: float
    samples: int
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The start of an interval."""

    at_s: float
    steps: int
    samples: int
    elapsed_s: float = 0.0
    exposed_s: float = 0.0
    rows_unique: int = 0
    rows_inserted: int = 0
    lanes: Mapping[str, LaneReport] = field(default_factory=dict)
    loss: LossSoFar | None = None


class Meter:
    """Measures intervals, one after another.

    Args:
        now_s: when the first one begins.
        steps, samples: trained before.
        num_steps: steps of the whole job, at most; None: unknown.
    """

    def __init__(self, now_s: float, *, steps: int = 0, samples: int = 0, num_steps: int | None = None) -> None:
        # The loss of the examples before a resume comes with the first sum.
        loss = None if samples else LossSoFar(loss_sum=0.0, samples=0)
        self._first = self._mark = _Mark(at_s=now_s, steps=steps, samples=samples, loss=loss)
        self._num_steps = num_steps

    @property
    def began_s(self) -> float:
        """The start of the interval."""
        return self._mark.at_s

    @property
    def samples(self) -> int:
        """Examples trained before the interval."""
        return self._mark.samples

    def measure(self, now_s: float, progress: Progress, loss: LossSoFar | None) -> dict[str, Any]:
        """The values at the end of an interval, where the next one begins.

        Args:
            now_s: its end.
            progress: totals.
            loss: the latest that is known; None: there is none.
        """
        mark = self._mark
        elapsed_s = progress.elapsed_s - mark.elapsed_s
        exposed_s = max(0.0, progress.exposed_s - mark.exposed_s)
        exposed_share = exposed_s / elapsed_s if elapsed_s > 0 else 0.0
        unique, missing = progress.rows_unique - mark.rows_unique, progress.rows_inserted - mark.rows_inserted
        wait = waited_for(mark.lanes, progress.lanes) if exposed_share >= _WORTH_SHARE else None
        self._mark = _Mark(
            at_s=now_s,
            steps=progress.steps,
            samples=progress.samples,
            elapsed_s=progress.elapsed_s,
            exposed_s=progress.exposed_s,
            rows_unique=progress.rows_unique,
            rows_inserted=progress.rows_inserted,
            lanes=progress.lanes,
            loss=loss if loss is not None else mark.loss,
        )
        return {
            "samples": progress.samples,
            "samples_per_s": (progress.samples - mark.samples) / max(now_s - mark.at_s, 1e-9),
            "loss": None if loss is None else _finite(loss.loss_sum / loss.samples),
            "interval_loss": _interval_loss(mark.loss, loss),
            **({} if loss is None or loss.gradient_norm is None else {"grad_norm": _finite(loss.gradient_norm)}),
            "hit_rate": progress.hit_rate,
            "interval_hit_rate": 1 - missing / unique if unique else None,
            "exposed_s": progress.exposed_s,
            "exposed_share": progress.exposed_s / progress.elapsed_s if progress.elapsed_s else 0.0,
            "interval_exposed_share": exposed_share,
            "waited_for": None if wait is None else dataclasses.asdict(wait),
            "rows_unique": progress.rows_unique,
            "rows_inserted": progress.rows_inserted,
            "rows_found": progress.rows_found,
            "rows_fetched": progress.rows_fetched,
            "rows_written": progress.rows_written,
            "evictions_waiting": progress.evictions_waiting,
            "skipped_batches": progress.skipped_batches,
            "loss_scale": progress.loss_scale,
            "eta_s": self._eta_s(now_s, progress.steps, progress.share),
            "lanes": {
                name: {
                    "busy_s": lane.busy_s,
                    "waits_s": dict(lane.waits_s),
                    **({"moved_bytes": lane.num_bytes} if lane.num_bytes else {}),
                }
                for name, lane in progress.lanes.items()
            },
        }

    def _eta_s(self, now_s: float, steps: int, share: float | None) -> float | None:
        """Time to the last step at the mean pace of this process; without their number, by the share of the data."""
        done = steps - self._first.steps
        num_steps = self._num_steps or (steps / share if share else None)
        if num_steps is None or done <= 0:
            return None
        return max(0, num_steps - steps) * (now_s - self._first.at_s) / done


def planned_steps(config: Config) -> int | None:
    """Steps of a whole job as far as its configuration tells, at most; None: the end of the data decides."""
    data, bounds = config.data, []
    if config.run.steps:
        bounds.append(config.run.steps)
    if data.limit:
        train = data.limit - math.floor(data.limit * data.eval_fraction)
        bounds.append(-(-train // data.batch_size) * data.epochs)
    return min(bounds, default=None)


def _interval_loss(before: LossSoFar | None, now: LossSoFar | None) -> float | None:
    """Mean loss of the examples between two sums; None: a sum is unknown, or there are none."""
    if before is None or now is None or now.samples == before.samples:
        return None
    return _finite((now.loss_sum - before.loss_sum) / (now.samples - before.samples))


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
