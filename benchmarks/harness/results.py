"""`Results`: results.json of one benchmark, written after every figure, so that a later failure loses little.

    results.json ──same machine and versions?──yes──> its parts stay; those measured now replace theirs
                                             └─no──> starts empty, and one line says why

A part is ``{"run": …, "found": …, "seconds": …, "error": …}``: the run that measures it (command, settings, code,
load), what it has found so far, its duration once it has ended, and the error if it failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bagpipe.errors import InputError

__all__ = ["Results", "to_text"]


class Results:
    """Parts by name, each JSON-able.

    Args:
        path: of the file.
        basis: what all parts have in common: ``machine`` and ``rehearsed``.
        parts: those measured before.
    """

    def __init__(self, path: Path, basis: Mapping[str, Any], parts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.basis = dict(basis)
        self.parts: dict[str, Any] = dict(parts or {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Results of a file. InputError: there are none."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            parts = values.pop("parts")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{path}: expected results of this benchmark ({error!r})") from None
        return cls(path, values, parts)

    @classmethod
    def on(cls, path: Path, basis: Mapping[str, Any]) -> tuple[Self, str | None]:
        """Results to add to, and a line for the user if earlier ones cannot be kept."""
        if not path.exists():
            return cls(path, basis), None
        try:
            found = cls.read(path)
        except InputError as error:
            return cls(path, basis), f"{error}: starting empty"
        if found.basis == dict(basis):
            return found, None
        theirs, ours = _flat(found.basis), _flat(basis)
        name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        return cls(path, basis), (
            f"{path}: starting empty, without its {', '.join(found.parts) or 'parts'}: "
            f"{name} is {ours.get(name)!r}, there it is {theirs.get(name)!r}"
        )

    @property
    def values(self) -> dict[str, Any]:
        """Content of the file."""
        return {**self.basis, "parts": self.parts}

    def begin(self, part: str, run: Mapping[str, Any]) -> None:
        """Start a part; its earlier content is dropped."""
        self.parts[part] = {"run": dict(run)}
        self._write()

    def put(self, part: str, found: Any) -> None:
        """Keep what a running part has found so far."""
        self.parts[part]["found"] = found
        self._write()

    def end(self, part: str, seconds: float, error: str | None = None) -> None:
        """End a part, with the error it failed with."""
        self.parts[part] |= {"seconds": round(seconds), **({} if error is None else {"error": error})}
        self._write()

    def restore(self, part: str, earlier: Any) -> None:
        """Give a part its earlier content back. None: it had none."""
        if earlier is None:
            del self.parts[part]
        else:
            self.parts[part] = earlier
        self._write()

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(to_text(self.values), encoding="utf-8")
        partial.replace(self.path)


def to_text(values: Any) -> str:
    """JSON with one record per line, so that a diff shows which records changed."""
    return _lines(values, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    """Nested mappings are indented. An item of a list takes one line; so does what holds plain values only."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(child, (dict, list)) for child in children):
        return json.dumps(value)
    more = indent + " "
    if isinstance(value, dict):
        pairs = [f"{more}{json.dumps(name)}: {_lines(child, more)}" for name, child in value.items()]
        return "{\n" + ",\n".join(pairs) + f"\n{indent}}}"
    return "[\n" + ",\n".join(more + json.dumps(child) for child in value) + f"\n{indent}]"


def _flat(basis: Mapping[str, Any]) -> dict[str, Any]:
    """The machine's entries beside the others."""
    return {**{name: value for name, value in basis.items() if name != "machine"}, **basis.get("machine", {})}
