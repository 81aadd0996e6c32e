"""`Best`: the checkpoint of the best evaluation so far, by name: the file ``best.json`` in the job's folder.

evaluation better than all before ──checkpoint published──> write ──> kept by `CheckpointFolder.prune`; resume = best
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from bagpipe.checkpoint.files import open_plain, write_whole
from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json

__all__ = ["Best", "read_best", "write_best"]

_NAME = "best.json"
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A checkpoint and what makes it the best.

    Attributes:
        generation, step: of the checkpoint.
        metric: name of the metric.
        value: of the metric.
    """

    generation: int
    step: int
    metric: str
    value: float

    @property
    def position(self) -> tuple[int, int]:
        """Generation and step, as `Checkpoint.position`."""
        return (self.generation, self.step)


def read_best(folder: Path) -> Best | None:
    """The best checkpoint of a job's folder; None if none is named.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open_plain(folder / _NAME) as file:
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"checkpoint.dir: {folder / _NAME} cannot be read: {error.strerror}") from None
    try:
        value = parse_json(text)
        return Best(
            generation=int(value["generation"]),
            step=int(value["step"]),
            metric=str(value["metric"]),
            value=float(value["value"]),
        )
    except (ValueError, OverflowError, TypeError, KeyError) as error:
        raise InputError(f"checkpoint.dir: {folder / _NAME} does not name a checkpoint: {error!r}") from None


def write_best(folder: Path, best: Best) -> None:
    """Name the best checkpoint, in place of the one before.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(folder / _NAME, (json.dumps(dataclasses.asdict(best)) + "\n").encode())
