"""Second-order work as text: layers of stages from ``2`` or ``2,1,1,3``, and what of the work fits into gaps.

second-order work: 42 of 47 actions fit; a batch takes 24, 23 without COV and X_INV, 22 without any
did not fit: rank0 0COV_G3 (1), rank1 1X_INV1 (1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagpipe.errors import ScheduleError
from bagpipe.schedule.lowering.precondition import Placement

__all__ = ["PlacementFigures", "layers_of_text", "placement_summary", "placement_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFigures:
    """A placement, and times that it is compared with.

    Attributes:
        placement: the placement.
        period: time per batch of the program.
        period_plain: the same of the program without second-order work.
        makespan_plain: time of one batch of that program alone.
    """

    placement: Placement
    period: float
    period_plain: float
    makespan_plain: float


def layers_of_text(text: str, num_stages: int) -> dict[int, int]:
    """Layers by stage, of ``2`` for each stage, or ``2,1,1,3``.

    Raises:
        ScheduleError: not one number, or one per stage.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 5 for part in parts):
        raise ScheduleError(f"expected layers per stage such as 2 or 2,1,1,3, each below 10000, got {text!r}")
    counts = [int(part) for part in parts] * (num_stages if len(parts) == 1 else 1)
    if len(counts) != num_stages:
        raise ScheduleError(f"expected 1 number of layers or {num_stages}, one per stage, got {text}")
    return dict(enumerate(counts))


def placement_text(figures: PlacementFigures) -> str:
    """Two lines: how long a batch takes, and what did not fit, by lane."""
    lanes = figures.placement.lanes
    fit = sum(len(lane.placed) for lane in lanes.values())
    unfit = {name: lane for name, lane in lanes.items() if lane.unfit}
    left = [
        f"{name} {' '.join(action.text for action in lane.unfit)} ({lane.unfit_time:g})" for name, lane in unfit.items()
    ]
    count = fit + sum(len(lane.unfit) for lane in unfit.values())
    return (
        f"second-order work: {fit} of {count} actions fit; a batch takes {figures.period:g}, "
        f"{figures.placement.period_without:g} without COV and X_INV, {figures.period_plain:g} without any\n"
        f"did not fit: {', '.join(left) or 'nothing'}\n"
    )


def placement_summary(figures: PlacementFigures) -> dict[str, Any]:
    """The placement as plain JSON values; times in the unit of the costs."""
    placement = figures.placement
    return {
        "period": figures.period,
        "period_without_work": placement.period_without,
        "period_plain": figures.period_plain,
        "period_bound": placement.bound,
        "makespan_plain": figures.makespan_plain,
        "lanes": {
            name: {
                "placed": [
                    {"action": timed.action.text, "start": timed.start, "finish": timed.finish} for timed in lane.placed
                ],
                "unfit": [action.text for action in lane.unfit],
                "unfit_time": lane.unfit_time,
                "inputs_kept": placement.inputs_kept[name],
                "gradients_kept": placement.gradients_kept[name],
            }
            for name, lane in placement.lanes.items()
        },
    }
