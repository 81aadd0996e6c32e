"""The recommended setting: the smallest cache, then the shortest window, with little more traffic than the best
setting.

    least  = the fewest bytes that any setting moves between store and caches
    cache  = the smallest with a window and policy that move at most 1.10 x least
    window = the shortest that at this cache moves at most 1.02 x what the best window moves
    policy = of the remaining ones, the one that moves least; of equals the first named

A cache costs memory, and a window costs the oracle's memory and the job's first seconds, so both should be as small as
the traffic allows. Only oracle policies count, because training supports no others, and only the first batch size,
because it is a property of the model. Traffic is bytes read and written, since the rows of tables can differ in width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.oracle.eviction import POLICIES
from data.replay.records import ReplayRecord, Setting, Trial

__all__ = ["Recommendation", "recommend", "setting_of"]

#: Accepted traffic of a smaller cache relative to the best setting, of a shorter window relative to the best one.
CACHE_TOLERANCE = 1.10
WINDOW_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A recommended setting and the reason for it."""

    setting: Setting
    reason: str


def setting_of(record: ReplayRecord | Trial) -> Setting:
    """The setting of a record or a trial."""
    return Setting(
        policy=record.policy,
        lookahead=record.lookahead,
        cache_rows=record.cache_rows,
        batch_size=record.batch_size,
        world_size=record.world_size,
    )


def recommend(records: Sequence[ReplayRecord]) -> Recommendation | None:
    """Choose a setting by the rule of this module; None if no oracle setting could be replayed."""
    usable = [record for record in records if record.policy in POLICIES and record.error is None]
    usable = [record for record in usable if record.batch_size == usable[0].batch_size]
    if not usable:
        return None
    least = min(map(_traffic, usable))
    cache_rows = min(record.cache_rows for record in usable if _traffic(record) <= CACHE_TOLERANCE * least)
    here = [record for record in usable if record.cache_rows == cache_rows]
    least_here = min(map(_traffic, here))
    lookahead = min(record.lookahead for record in here if _traffic(record) <= WINDOW_TOLERANCE * least_here)
    taken = min((record for record in here if record.lookahead == lookahead), key=_traffic)
    return Recommendation(setting=setting_of(taken), reason=_reason(taken, usable, least))


def _reason(taken: ReplayRecord, usable: Sequence[ReplayRecord], least: int) -> str:
    """One sentence with the deciding figures."""
    ratio = _traffic(taken) / max(1, least)
    moves = "moves the fewest bytes of all" if ratio <= 1 else f"moves {ratio:.3f} times the fewest bytes of all"
    parts = [
        f"{taken.policy} with {taken.cache_rows:,} rows per rank and a window of {taken.lookahead} batches {moves} "
        f"({_traffic(taken) / 1e6:,.1f} MB)"
    ]
    smaller = [record for record in usable if record.cache_rows < taken.cache_rows]
    if smaller:
        next_rows = max(record.cache_rows for record in smaller)
        at_best = min(_traffic(record) for record in smaller if record.cache_rows == next_rows)
        parts.append(f"the next smaller cache ({next_rows:,} rows) {at_best / max(1, least):.3f} times")
    shorter = [
        record for record in usable if record.cache_rows == taken.cache_rows and record.lookahead < taken.lookahead
    ]
    if shorter:
        nearest = max(record.lookahead for record in shorter)
        at_best = min(_traffic(record) for record in shorter if record.lookahead == nearest)
        parts.append(f"the next shorter window ({nearest}) {at_best / max(1, least):.3f} times")
    return f"{parts[0]}; {' and '.join(parts[1:])}." if parts[1:] else f"{parts[0]}."


def _traffic(record: ReplayRecord) -> int:
    """Bytes between store and caches over the whole log."""
    return (record.bytes_fetched or 0) + (record.bytes_written or 0)
