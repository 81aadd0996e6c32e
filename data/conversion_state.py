"""`check_finished`: refuses a folder that a conversion has not finished: it lacks parts of the data.

The folder's manifest begins with what is converted and ends, when all parts are there, with their number
(`data.conversion_manifest`). A file of that name with other content is somebody else's, and says nothing.
"""

from __future__ import annotations

from typing import Any

from bagpipe.errors import InputError
from bagpipe.files.access import join, open_file
from bagpipe.util.documents import parse_json
from bagpipe.util.programs import command_of

__all__ = ["MANIFEST", "check_finished", "finished_parts"]

#: Name of a folder's manifest.
MANIFEST = "_conversion.jsonl"


def finished_parts(line: bytes) -> int | None:
    """The number of parts in the last line of a finished manifest; None: another line."""
    value = _value(line)
    parts = value.get("finished") if isinstance(value, dict) else None
    return parts if type(parts) is int else None


def check_finished(folder: str) -> None:
    """Check a folder that has a manifest.

    Raises:
        InputError: its conversion has not ended.
    """
    path = join(folder, MANIFEST)
    try:
        with open_file(path) as stream:
            lines = stream.read().splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    header = _value(lines[0]) if lines else None
    if not isinstance(header, dict) or not {"conversion", "inputs"} <= header.keys():
        return
    if finished_parts(lines[-1]) is None:
        raise InputError(
            f"{folder}: its conversion has not ended, so parts of the data are missing: `{command_of('data')} convert "
            f"… {folder}` with the same inputs and options finishes it"
        )


def _value(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None
