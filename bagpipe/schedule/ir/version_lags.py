"""`VersionLags`: the weights that a stage of an asynchronous schedule uses for batch b, relative to b.

    pipedream, gap 2     forward b - 2                      backward the same
    pipeoptim, gap 2     forward b, predicted from b - 2    backward b, which exists then

They depend on the number of the batch alone. So a job has the same weights in whatever order a schedule works, wherever
it pauses, and however often it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagpipe.schedule.ir.loop import Loop

__all__ = ["VersionLags", "version_lags"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLags:
    """A lag of n means version ``max(0, b - n)`` for batch b; below 0 it is ahead of the batch's own version.

    Attributes:
        forward, backward: of the version that the weights are or stand for.
        forward_base, backward_base: of the version from which they are predicted; equal: they are that version.
    """

    forward: int
    backward: int
    forward_base: int
    backward_base: int

    @property
    def predicts_forward(self) -> bool:
        return self.forward_base > self.forward

    @property
    def predicts_backward(self) -> bool:
        """Whether the backward has a prediction of its own, not that of its forward."""
        return self.backward_base > self.backward and not self.is_same

    @property
    def is_same(self) -> bool:
        """Whether a backward has the weights of its forward."""
        return (self.forward, self.forward_base) == (self.backward, self.backward_base)


def version_lags(loop: Loop) -> Mapping[int, VersionLags]:
    """Stage -> its lags, from the templates of an asynchronous loop."""
    found: dict[int, dict[str, int]] = {}
    for _, template in loop.templates:
        if template.version_lag is not None:
            found.setdefault(template.stage, {})[template.op] = template.version_lag
    return {stage: _lags(own, keeps=loop.semantics == "stash") for stage, own in sorted(found.items())}


def _lags(own: Mapping[str, int], *, keeps: bool) -> VersionLags:
    base = own.get("PRED", own["F"])
    return VersionLags(
        forward=own["F"],
        forward_base=base,
        backward=own["B"],
        backward_base=base if keeps else own.get("PRED_B", own["B"]),
    )
