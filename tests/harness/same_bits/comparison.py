"""`difference`: what differs between the ends of two runs of a job, in words. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tests.harness.fuzz.twin import Outcome

__all__ = ["MEASURED", "difference"]

#: Fields of a result that may differ: times, memory, how rows travelled, and what one start of a job did.
MEASURED = frozenset(
    {
        "seconds", "samples_per_s", "exposed_embedding_s", "step_s_p50", "planned_step_s", "peak_rss_bytes",
        "rows_unique", "rows_new", "rows_fetched", "rows_written", "rows_deleted", "evictions_waiting", "cache_rows",
        "hit_rate", "resumed_from", "checkpoints", "checkpoint_stall_s", "started_from",
    }
)  # fmt: skip
#: More fields than these are counted only.
_MOST_NAMED = 4


def difference(base: Outcome, head: Outcome, names: tuple[str, str] = ("BASE", "HEAD")) -> str:
    """The difference; empty: the results are equal in all fields that both have, except those of `MEASURED`.

    Args:
        base, head: the two ends.
        names: of the two.
    """
    ends = {name: outcome.problem for name, outcome in zip(names, (base, head), strict=True) if outcome.problem}
    if ends:
        return "; ".join(f"{name}: {problem}" for name, problem in ends.items())
    if base.result is None or head.result is None:
        if _end(base) == _end(head):
            return f"expected results, both ended with {_end(base)}"
        return f"{names[0]} ended with {_end(base)}, {names[1]} with {_end(head)}"
    both = base.result.keys() & head.result.keys() - MEASURED
    olds, news = (
        dict(_leaves("", {key: result[key] for key in result if key in both})) for result in (base.result, head.result)
    )
    found = [
        f"{path} {_short(news, path)} for {_short(olds, path)}"
        for path in sorted({**olds, **news}, key=lambda path: not path.endswith("_digest"))
        if olds.get(path) != news.get(path)
    ]
    more = [f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return "; ".join(found[:_MOST_NAMED] + more)


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Numbers and texts of a result by path, as JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, json.dumps(value)
        return
    for key, item in items:
        yield from _leaves(f"{path}.{key}".lstrip("."), item)


def _short(values: Mapping[str, str], path: str) -> str:
    return values.get(path, "nothing").strip('"')[:24]


def _end(outcome: Outcome) -> str:
    if outcome.result is not None:
        return f"{outcome.result['steps']} steps"
    return f"code {outcome.code}: {' | '.join(outcome.lines)}"
