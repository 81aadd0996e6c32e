"""`check_spec`: whether an `OracleSpec` can be planned for. Takes none of a planner's memory."""

from __future__ import annotations

from bagpipe.errors import InputError
from bagpipe.oracle.assign import ASSIGNERS, check_shares
from bagpipe.oracle.eviction import POLICIES
from bagpipe.oracle.plan import HORIZONS, OracleSpec, spare_slots

__all__ = ["MAX_RANKS", "MAX_SLOTS", "check_spec"]

#: Slots of all ranks together: slot numbers are int32.
MAX_SLOTS = (1 << 31) - 1
#: Ranks: rank numbers are uint16 on the wire.
MAX_RANKS = (1 << 16) - 1


def check_spec(spec: OracleSpec) -> None:
    """Check a spec.

    Raises:
        InputError: the spec cannot be planned for.
    """
    if spec.policy not in POLICIES:
        raise InputError(f"oracle.policy must be one of {', '.join(sorted(POLICIES))}, got {spec.policy!r}")
    if spec.assign not in ASSIGNERS:
        raise InputError(f"cacher.assign must be one of {', '.join(sorted(ASSIGNERS))}, got {spec.assign!r}")
    if spec.lookahead < 1:
        raise InputError(f"oracle.lookahead must be at least 1, got {spec.lookahead}")
    if not 1 <= spec.world_size <= MAX_RANKS:
        raise InputError(f"the world size must be from 1 to {MAX_RANKS}, got {spec.world_size}")
    check_shares(spec)
    if spec.horizon not in HORIZONS:
        raise InputError(f"oracle.horizon must be one of {', '.join(HORIZONS)}, got {spec.horizon!r}")
    if spec.horizon == "log" and spec.policy == "drop-unused":
        raise InputError("oracle.horizon log orders idle rows, but oracle.policy drop-unused keeps none")
    if spec.grows and not spec.num_slots:
        raise InputError("cache.rows auto must be able to hold at least 1 row, got 0")
    if spec.num_slots < 0:
        raise InputError(f"cache.rows must be at least 0, got {spec.num_slots}")
    if spec.rows_delay not in (0, 1):
        raise InputError(f"pipeline.rows_delay must be 0 or 1, got {spec.rows_delay}")
    if spec.slots_per_rank * spec.world_size > MAX_SLOTS:
        raise InputError(
            f"cache.rows of all {spec.world_size} ranks, with spare slots, must be at most {MAX_SLOTS}, got "
            f"{spec.num_slots} and {spare_slots(spec.num_slots)} spare ones each"
        )
    tables = [ref.table for ref in spec.features]
    if tables != sorted(tables):
        raise InputError(f"features must be sorted by table number, got {tables}")
