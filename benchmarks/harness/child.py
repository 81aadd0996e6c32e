"""`run_child`: a measured program in a process of its own, and the JSON value that it leaves in a file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagpipe.errors import JobError

__all__ = ["run_child"]


def run_child(command: Sequence[str], outcome: Path, *, name: str, timeout_s: float) -> Any:
    """What the program has left in its file.

    Args:
        command: the program and its arguments.
        outcome: file that it writes.
        name: of the program, for the error.
        timeout_s: after which it is killed.

    Raises:
        JobError: it ended with another code than 0; with the end of its standard error.
        subprocess.TimeoutExpired: it did not end in time.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise JobError(f"{name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(outcome.read_text(encoding="utf-8"))
