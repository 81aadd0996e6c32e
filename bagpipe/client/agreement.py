"""What a trainer and its cacher must agree on before a step is sent. Pure.

    Config ──settings_of──> {key: value}, travels in Hello ──first_difference──> key and both values, or None

Both sides derive the plan's inputs from configuration keys; the cacher compares key by key and refuses the first that
differs. Keys that only say how fast or where something is done may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.config.sections import Config

__all__ = [
    "MAX_CACHER_MESSAGE_BYTES",
    "MAX_TRAINER_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "SECRET_METADATA",
    "Difference",
    "first_difference",
    "settings_of",
]

#: Raised when an older peer would misunderstand what a newer one says.
PROTOCOL_VERSION = 6

#: Requests hold numbers and a configuration; a step of 65,536 x 200 ids takes about 320 MB.
MAX_TRAINER_MESSAGE_BYTES = 1 << 20
MAX_CACHER_MESSAGE_BYTES = 1 << 30

#: Metadata key of the shared secret.
SECRET_METADATA = "x-bagpipe-secret"

#: How the cacher's own machine parses; the batches are the same.
_FREE_DATA_KEYS = frozenset({"workers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two JSON values differ: dotted path, and both values ("nothing" where one has none)."""

    path: str
    first: str
    second: str


def settings_of(config: Config) -> dict[str, Any]:
    """Values of the keys that decide what is in a step, by dotted key; JSON-able."""
    data = {f"data.{name}": value for name, value in dataclasses.asdict(config.data).items()}
    return {
        **{key: value for key, value in data.items() if key.partition(".")[2] not in _FREE_DATA_KEYS},
        "run.seed": config.run.seed,
        "oracle.lookahead": config.oracle.lookahead,
        "oracle.policy": config.oracle.policy,
        "cache.rows": config.cache.rows,
        "cacher.assign": config.cacher.assign,
    }


def first_difference(first: object, second: object, path: str = "") -> Difference | None:
    """Compare two JSON values, objects key by key and lists place by place; None if they are equal."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in [*first, *(key for key in second if key not in first)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in first or key not in second:
                return Difference(path=where, first=_shown(first, key), second=_shown(second, key))
            found = first_difference(first[key], second[key], where)
            if found is not None:
                return found
        return None
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            found = first_difference(one, other, f"{path}[{number}]")
            if found is not None:
                return found
        return None
    # True == 1 and 1 == 1.0, but they are not the same setting.
    if first == second and isinstance(first, bool) == isinstance(second, bool):
        return None
    return Difference(path=path, first=_short(first), second=_short(second))


def _shown(values: Mapping[str, Any], key: str) -> str:
    return _short(values[key]) if key in values else "nothing"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
