"""State of a pipeline in its checkpoints, beside model and rows: position, hashes, learning rates, tracked objects.

    Position, hashes, {name: state_dict} ──to_saved──> JSON values and bytes ──UserState──> checkpoint
                                         <──from_saved──

States of loaders and tracked objects hold tensors, arrays and plain Python values (`plain_state`), no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagpipe.errors import InputError
from bagpipe.train_pipeline.plain_state import from_bytes, to_bytes
from bagpipe.train_pipeline.user_batches import Position

__all__ = ["SavedState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of one rank between two batches.

    Attributes:
        position: of the next batch.
        hashes: of batches that were read already, by number.
        groups: settings of the dense optimizer's parameter groups, such as learning rates.
        tracked: ``state_dict`` of objects, by the user's names for them.
    """

    position: Position
    hashes: Mapping[int, str] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    tracked: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, step: int) -> SavedState:
        """The state between two iterators, with nothing else."""
        return cls(position=Position(step=step))

    def to_saved(self) -> dict[str, Any]:
        """JSON values and bytes, by name."""
        position = self.position
        return {
            "epoch": position.epoch,
            "taken": position.taken,
            "hashes": {str(number): text for number, text in self.hashes.items()},
            "objects": to_bytes(
                {"loader": position.loader, "groups": list(self.groups), "tracked": dict(self.tracked)}
            ),
        }

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], step: int) -> SavedState:
        """The state that `to_saved` gave, at a step.

        Raises:
            InputError: it cannot be read.
        """
        try:
            objects = from_bytes(saved["objects"])
            position = Position(
                step=step, epoch=int(saved["epoch"]), taken=int(saved["taken"]), loader=objects["loader"]
            )
            hashes = {int(number): str(text) for number, text in saved["hashes"].items()}
            return cls(position=position, hashes=hashes, groups=objects["groups"], tracked=objects["tracked"])
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"the loader's or a tracked state in the checkpoint cannot be read: {reason}") from None
