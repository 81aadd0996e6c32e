"""`Results`: what was measured, in a file that is whole after every part, so that a later crash costs little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from bagpipe.errors import InputError

__all__ = ["Results"]


class Results:
    """Named parts, each JSON-able.

    Args:
        path: of the file.
        values: parts that are there already.
    """

    def __init__(self, path: Path, values: dict[str, Any] | None = None) -> None:
        self.path = path
        self.values: dict[str, Any] = dict(values or {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """InputError if there are none."""
        try:
            return cls(path, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: expected results of this benchmark ({error})") from None

    def put(self, part: str, value: Any) -> None:
        """Keep a part, and write all of them."""
        self.values[part] = value
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)
