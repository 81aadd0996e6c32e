"""`look_of`: colour, marker and line of a policy, equal in all charts and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagpipe.report.charts import INK, Look

__all__ = ["FAILED", "look_of"]

FAILED = "#d00000"
_LOOKS: Mapping[str, Look] = {
    "belady-window": Look(color="#0072b2", symbol="circle"),
    "drop-unused": Look(color="#e69f00", symbol="square"),
    "belady-log": Look(color="#0072b2", symbol="circle-open", dash="dash"),
    "lru": Look(color="#d55e00", symbol="triangle-up"),
    "lfu": Look(color="#cc79a7", symbol="triangle-down"),
    "static-hot": Look(color="#009e73", symbol="diamond"),
    "offline-belady": Look(color=INK, symbol="line-ew-open", dash="dash"),
}
_OTHER_LOOKS = (
    Look(color="#56b4e9", symbol="cross"),
    Look(color="#7f7f7f", symbol="star"),
    Look(color="#0072b2", symbol="hexagon", dash="dot"),
    Look(color="#d55e00", symbol="pentagon", dash="dot"),
)


def look_of(name: str, others: Sequence[str] = ()) -> Look:
    """The look of policy `name`; an unknown policy takes a free look, by its position among `others`."""
    if name in _LOOKS:
        return _LOOKS[name]
    strangers = [other for other in others if other not in _LOOKS]
    position = strangers.index(name) if name in strangers else 0
    return _OTHER_LOOKS[position % len(_OTHER_LOOKS)]
