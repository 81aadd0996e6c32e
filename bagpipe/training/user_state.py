"""`UserState`: what a caller keeps in checkpoints beside the model, such as the position of its data loader.

    a checkpoint at step C ──state_at(C)──> this rank's values and bytes ──> Part.progress ──saved_state──> as they were

Every rank has its own state. It is part of the manifest, which a start reads as a whole: keep it small.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

from bagpipe.errors import InputError, JobError
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.util.documents import parse_json

__all__ = ["MAX_STATE_BYTES", "UserState", "saved_state"]

#: Largest state of one rank, as JSON and base64: about 3 MiB of bytes. A manifest has the states of all ranks, and is
#: read up to 256 MiB.
MAX_STATE_BYTES = 4 << 20

#: Key in `Part.progress`.
_KEY = "user_state"


class UserState(LoopPart):
    """The state of one rank.

    Args:
        state_at: ``state_at(step)`` returns the state before batch `step` is trained, by name: values that JSON can
            express (they come back as JSON gives them: a tuple as a list), or bytes. Called once per checkpoint, in the
            thread that begins it: of the compute lane, or another one with several ranks. Its errors end the job.

    A checkpoint fails with JobError if the state is not a mapping of strings to such values, or is too large.
    """

    name = _KEY

    def __init__(self, state_at: Callable[[int], Mapping[str, Any]]) -> None:
        self._state_at = state_at
        self._step = 0

    def start(self, run: LoopRun) -> None:
        self._step = run.first_batch

    def finish_batch(self, b: int) -> None:
        self._step = b + 1

    def counters(self) -> Mapping[str, Any]:
        return {_KEY: _encode(self._step, self._state_at(self._step))}


def saved_state(progress: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that a rank's `Part.progress` keeps; None if it keeps none.

    Raises:
        InputError: it is not one that `UserState` wrote.
    """
    record = progress.get(_KEY)
    if record is None:
        return None
    try:
        blobs = {name: base64.b64decode(text, validate=True) for name, text in record["bytes"].items()}
        return {**record["values"], **blobs}
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise InputError(f"the user's state in the checkpoint cannot be read: {error!r}") from None


def _encode(step: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state as a JSON value: the caller can change it before the checkpoint is written."""
    where = f"the user's state for the checkpoint at step {step}"
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise JobError(f"{where}: expected a mapping with strings as keys, got {state!r:.200}")
    blobs = {name: bytes(value) for name, value in state.items() if isinstance(value, bytes | bytearray | memoryview)}
    values: dict[str, str] = {}
    for name, value in state.items():
        if name not in blobs:
            try:
                values[name] = json.dumps(value)
            except (TypeError, ValueError) as error:
                raise JobError(f"{where}: expected bytes or JSON for {name!r}, got {value!r:.200}: {error}") from None
    texts = {name: base64.b64encode(blob).decode("ascii") for name, blob in blobs.items()}
    num_bytes = sum(len(text) for part in (values, texts) for text in part.values())
    if num_bytes > MAX_STATE_BYTES:
        raise JobError(f"{where}: expected at most {MAX_STATE_BYTES} bytes, as JSON and base64, got {num_bytes}")
    return {"values": {name: parse_json(text) for name, text in values.items()}, "bytes": texts}
