"""`Results`: what was measured, in a file that is whole after every part, so that a later crash costs little.

    results.json ──same device, processor, system, versions?──yes──> its parts stay, those measured now take their place
                                                            └─no──> begun anew, and one line says so

Every part carries the run that measured it: its sizes, the code it ran, the load, what was missing, the copy rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bagpipe.errors import InputError

__all__ = ["Results"]


class Results:
    """Parts by name, each JSON-able.

    Args:
        path: of the file.
        basis: what all parts have in common: ``kind`` of the device, ``rehearsed``, ``machine``.
        parts: those that are there already.

    A part is ``{"run": …, "found": …, "error": …, "seconds": …}``: the run that measures it, what was found so far, why
    it failed if it did, and how long it took, if it came to its end.
    """

    def __init__(self, path: Path, basis: Mapping[str, Any], parts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.basis = dict(basis)
        self.parts: dict[str, Any] = dict(parts or {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """InputError if there are none."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            parts = values.pop("parts")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{path}: expected results of this benchmark ({error!r})") from None
        return cls(path, values, parts)

    @classmethod
    def on(cls, path: Path, basis: Mapping[str, Any]) -> tuple[Self, str | None]:
        """Results of this machine to add to, and a line for people if what was there cannot be kept."""
        if not path.exists():
            return cls(path, basis), None
        try:
            found = cls.read(path)
        except InputError as error:
            return cls(path, basis), f"{error}: begun anew"
        if found.basis == dict(basis):
            return found, None
        theirs, ours = _flat(found.basis), _flat(basis)
        name = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
        return cls(path, basis), (
            f"{path}: begun anew, without its {', '.join(found.parts) or 'parts'}: "
            f"{name} is {ours.get(name)!r}, there it is {theirs.get(name)!r}"
        )

    @property
    def values(self) -> dict[str, Any]:
        """What the file holds."""
        return {**self.basis, "parts": self.parts}

    def begin(self, part: str, run: Mapping[str, Any]) -> None:
        """A part is about to be measured; what it had is forgotten."""
        self.parts[part] = {"run": dict(run)}
        self._write()

    def put(self, part: str, found: Any) -> None:
        """Keep what was found so far of a part that has begun."""
        self.parts[part]["found"] = found
        self._write()

    def end(self, part: str, seconds: float, error: str | None = None) -> None:
        """The part came to its end, by itself or by an error."""
        self.parts[part] |= {"seconds": round(seconds), **({} if error is None else {"error": error})}
        self._write()

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def _flat(basis: Mapping[str, Any]) -> dict[str, Any]:
    """The machine's lines among the others."""
    return {**{name: value for name, value in basis.items() if name != "machine"}, **basis.get("machine", {})}
