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

__all__ = ["BEST_NAME", "Best", "decode_best", "encode_best", "read_best", "write_best"]

#: Name of the file.
BEST_NAME = "best.json"
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
        with open_plain(folder / BEST_NAME) as file:
            content = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"checkpoint.dir: {folder / BEST_NAME} cannot be read: {error.strerror}") from None
    return decode_best(content, f"checkpoint.dir: {folder / BEST_NAME}")


def decode_best(content: bytes, name: str) -> Best:
    """The best checkpoint that a file names.

    Args:
        content: the file's bytes.
        name: of the file, for messages.

    Raises:
        InputError: it names none.
    """
    try:
        value = parse_json(content.decode(errors="replace"))
        return Best(
            generation=int(value["generation"]),
            step=int(value["step"]),
            metric=str(value["metric"]),
            value=float(value["value"]),
        )
    except (ValueError, OverflowError, TypeError, KeyError) as error:
        raise InputError(f"{name} does not name a checkpoint: {error!r}") from None


def encode_best(best: Best) -> bytes:
    """The content of the file."""
    return (json.dumps(dataclasses.asdict(best)) + "\n").encode()


def write_best(folder: Path, best: Best) -> None:
    """Name the best checkpoint, in place of the one before.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(folder / BEST_NAME, encode_best(best))
