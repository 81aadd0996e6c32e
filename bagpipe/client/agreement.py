"""The settings that a trainer and its cacher must share. Pure.

    Config ──settings_of──> {key: value}, sent in Hello ──first_difference──> key and both values, or None

Both sides derive the plan's inputs from configuration keys. The cacher compares them key by key and refuses the first
difference. Keys that affect only speed or location can differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.config.sections import Config

__all__ = [
    "MAX_CACHER_MESSAGE_BYTES",
    "MAX_CREDITS",
    "MAX_IDS_BYTES",
    "MAX_PLAN_BYTES",
    "MAX_TRAINER_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "SECRET_METADATA",
    "Difference",
    "batches_per_message",
    "credits_for",
    "first_difference",
    "job_label",
    "settings_of",
]

#: Increased when an older peer would misunderstand a newer one.
PROTOCOL_VERSION = 13

#: Requests hold numbers and a configuration. A batch of 65,536 x 200 ids takes about 320 MB.
MAX_TRAINER_MESSAGE_BYTES = 1 << 20
MAX_CACHER_MESSAGE_BYTES = 1 << 30

#: Frames of a `Plan` stream, which cross in pieces: the ids of a batch, and one rank's plan of it. A plan takes 8 B per
#: id and 63 B per distinct one.
MAX_IDS_BYTES = 1 << 28
MAX_PLAN_BYTES = 1 << 30

#: Most credits of a rank: what a cacher holds for it is bounded.
MAX_CREDITS = 1024

#: Small batches: a rank's credits are worth so many examples, in at most so many batches more than it needs.
_CREDIT_EXAMPLES, _MAX_SPARE_CREDITS = 4_096, 32

#: Metadata key of the shared secret.
SECRET_METADATA = "x-bagpipe-secret"

#: Settings of the cacher's own machine. They do not change the batches.
_FREE_DATA_KEYS = frozenset({"workers"})


def job_label(job_id: str) -> str:
    """What stands for a job in logs and metrics: 12 hex digits of a SHA-256. The id itself is the job's secret."""
    return hashlib.sha256(job_id.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of two JSON values: dotted path and both values ("nothing" for a missing one)."""

    path: str
    first: str
    second: str


def credits_for(config: Config) -> int:
    """Batches in transit to a trainer or waiting there, at most: what it reads ahead, and more of small ones."""
    ahead, small = config.cache.read_ahead, -(-_CREDIT_EXAMPLES // config.data.batch_size)
    return ahead + max(0, min(small - ahead, _MAX_SPARE_CREDITS, MAX_CREDITS - ahead))


def batches_per_message(credits: int) -> int:
    """Batches that a rank acknowledges together, and that a cacher sends together while the rank has others.

    A message costs about as much as a batch of 64 examples. With a quarter of the credits in each direction, a rank
    that takes its batches as they come always has some.
    """
    return max(1, credits // 4)


def settings_of(config: Config) -> dict[str, Any]:
    """Values of the keys that decide the contents of a batch, by dotted key; JSON-able."""
    data = {
        f"data.{name}": list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(config.data).items()
    }
    return {
        **{key: value for key, value in data.items() if key.partition(".")[2] not in _FREE_DATA_KEYS},
        "run.seed": config.run.seed,
        "oracle.lookahead": config.oracle.lookahead,
        "oracle.policy": config.oracle.policy,
        "oracle.horizon": config.oracle.horizon,
        "cache.rows": config.cache.rows,
        "cacher.assign": config.cacher.assign,
    }


def first_difference(first: object, second: object, path: str = "") -> Difference | None:
    """Compare two JSON values, objects by key and lists by position. None if they are equal."""
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
    # True == 1 in Python, but they are different settings.
    if first == second and isinstance(first, bool) == isinstance(second, bool):
        return None
    return Difference(path=path, first=_short(first), second=_short(second))


def _shown(values: Mapping[str, Any], key: str) -> str:
    return _short(values[key]) if key in values else "nothing"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
