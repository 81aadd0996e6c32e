"""`Takings`: what a new job takes from other weights, table by table and parameter by parameter. Pure.

comparison ──Taking (one each)──> Takings ──lines──> stderr        ──to_json──> result, log, manifest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["Fate", "Taking", "Takings", "matches"]

#: Dense parameters that are listed one by one, if all of them are taken with their state.
_MAX_LISTED = 24


class Fate(Enum):
    """The result of comparing one thing with the new job."""

    TAKEN = "taken"
    NEW = "new"
    DROPPED = "dropped"
    CLASH = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """One thing: a table, a dense parameter or buffer, or a count that belongs to the whole job.

    Attributes:
        kind: ``rows``, ``dense`` or ``job``.
        name: of the table, parameter or count.
        fate: of its values.
        detail: their number and type, or why they do not fit.
        state: of its optimizer state; empty if it has none.
    """

    kind: str
    name: str
    fate: Fate
    detail: str = ""
    state: str = ""

    @property
    def label(self) -> str:
        """Its name in `checkpoint.start_without`."""
        return f"{self.kind}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Takings:
    """The takings of one job.

    Attributes:
        source: what is taken from, for people.
        items: tables in the order of the row schema, then dense, then job; dropped ones behind their kind.
    """

    source: str
    items: tuple[Taking, ...]

    @property
    def clashes(self) -> tuple[Taking, ...]:
        """Things of one name that do not fit."""
        return tuple(item for item in self.items if item.fate is Fate.CLASH)

    @property
    def is_empty(self) -> bool:
        """Neither rows nor dense weights are taken."""
        return not any(item.fate is Fate.TAKEN for item in self.items if item.kind != "job")

    def lines(self) -> list[str]:
        """A table for people."""
        shown, left_out = _listed(self.items)
        rows = [(item.label, item.fate.value, item.detail, item.state) for item in shown]
        titles = ("", "", "", "optimizer state") if any(row[3] for row in rows) else ("",) * 4
        widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(4)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        if titles[3]:
            lines.insert(0, " " * (sum(widths[:3]) + 6) + titles[3])
        if left_out:
            lines.append(f"and {left_out} more dense parameters and buffers, taken with their state")
        return [line.rstrip() for line in lines]

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "source": self.source,
            "items": [
                {"kind": item.kind, "name": item.name, "fate": item.fate.value, "detail": item.detail}
                | ({"state": item.state} if item.state else {})
                for item in self.items
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Takings:
        """The inverse of `to_json`."""
        items = [Taking(**{**item, "fate": Fate(item["fate"])}) for item in value["items"]]
        return cls(source=value["source"], items=tuple(items))


def matches(label: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern of `checkpoint.start_without` names a thing."""
    return any(fnmatchcase(label, pattern) for pattern in patterns)


def _listed(items: Sequence[Taking]) -> tuple[list[Taking], int]:
    """The items to list, and the number of those left out: a large model's parameters, all taken alike."""
    plain = [item for item in items if item.kind == "dense" and item.fate is Fate.TAKEN and item.state in ("", "taken")]
    if len(plain) <= _MAX_LISTED:
        return list(items), 0
    left_out = set(map(id, plain[_MAX_LISTED // 2 :]))
    return [item for item in items if id(item) not in left_out], len(left_out)
