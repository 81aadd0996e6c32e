"""`UserScaler`: the user's `torch.amp.GradScaler` as the holder of the loss scale.

    GradScaler ──read: state_dict──> LossScale of the next batch ──backward, steps, or the batch is left out──┐
       scale, growth tracker  <──write: load_state_dict───────────────────────────────────────────────────────┘

The scaler's own `scale`, `step` and `update` are not called. It shows what they would have led to.
"""

from __future__ import annotations

import math
from typing import Any

from torch.amp import GradScaler

from bagpipe.dense.loss_scale import LossScale
from bagpipe.errors import InputError

__all__ = ["UserScaler", "user_scaler"]

#: The normal powers of two of float32, in which torch keeps a scale.
LEAST, LARGEST = 2.0**-126, 2.0**127


class UserScaler:
    """See `bagpipe.dense.loss_scale.ScaleHolder`.

    Args:
        scaler: the user's, enabled.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def read(self) -> LossScale:
        """The scale of the next batch.

        Raises:
            InputError: the scaler's scale is no power of two, or it changes by other factors than 2 and 0.5.
        """
        state: dict[str, Any] = self._scaler.state_dict()
        factors = state["growth_factor"], state["backoff_factor"]
        if factors != (2.0, 0.5):
            raise InputError(f"grad_scaler must have growth_factor 2 and backoff_factor 0.5, got {factors}")
        scale, interval = float(state["scale"]), state["growth_interval"]
        if not (LEAST <= scale <= LARGEST and math.frexp(scale)[0] == 0.5):
            raise InputError(f"grad_scaler must have a scale that is a power of two, got {scale}")
        if type(interval) is not int or interval < 1:
            raise InputError(f"grad_scaler must have a growth_interval of at least 1, got {interval!r}")
        return LossScale(
            value=scale,
            growth_interval=interval,
            num_finite=state["_growth_tracker"],
            least=LEAST,
            largest=LARGEST,
        )

    def write(self, scale: LossScale) -> None:
        """Show a scale, with the finite batches since its last change."""
        state = {**self._scaler.state_dict(), "scale": float(scale.value), "_growth_tracker": int(scale.num_finite)}
        self._scaler.load_state_dict(state)


def user_scaler(scaler: GradScaler | None) -> UserScaler | None:
    """The holder of a user's scaler; None without one, or if it is disabled.

    Raises:
        InputError: it is no GradScaler, or cannot be followed (`UserScaler.read`).
    """
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise InputError(f"grad_scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if not scaler.is_enabled():
        return None
    holder = UserScaler(scaler)
    holder.read()
    return holder
