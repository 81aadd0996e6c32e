"""Output of the harness's commands: a line for each verdict as it comes, and all of them as a JSON file."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

__all__ = ["Judged", "show", "write_json"]


class Judged(Protocol):
    """A verdict. `problem` names the defect found, and is empty if there is none."""

    @property
    def problem(self) -> str: ...


V = TypeVar("V", bound=Judged)


def show(
    verdicts: Iterable[V], line: Callable[[V], str], repeat: Callable[[V], str], *, good: str = "equal"
) -> list[V]:
    """Print every verdict as it comes, and return all.

    Args:
        verdicts: outcomes of runs.
        line: description of a run and its numbers.
        repeat: lines to print below a wrong run: its command and folder.
        good: words for a run without a problem.
    """
    shown = []
    for verdict in verdicts:
        shown.append(verdict)
        how = good if not verdict.problem else f"WRONG: {verdict.problem}"
        sys.stdout.write(f"{line(verdict)}: {how}\n")
        if verdict.problem:
            sys.stdout.write(f"{repeat(verdict)}\n")
        sys.stdout.flush()
    return shown


def write_json(path: str, value: object) -> None:
    """Write lists, dicts and dataclasses as JSON. An empty path writes nothing."""
    if path:
        Path(path).write_text(json.dumps(value, default=_as_dict, indent=2) + "\n")


def _as_dict(item: Any) -> dict[str, Any]:
    return dataclasses.asdict(item)
