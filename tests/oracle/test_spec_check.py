"""Specs that cannot be planned for are refused with the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from bagpipe.errors import InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.spec_check import check_spec

SPEC = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=4, lookahead=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "best"}, "oracle.policy must be one of belady-window, drop-unused, got 'best'"),
        ({"lookahead": 0}, "oracle.lookahead must be at least 1, got 0"),
        ({"num_slots": -1}, "cache.rows must be at least 0, got -1"),
        ({"world_size": 0}, "the world size must be from 1 to 65535, got 0"),
        (
            {"world_size": 2, "num_slots": 2**30},
            r"cache.rows of all 2 ranks, with spare slots, must be at most 2147483647, got 1073741824",
        ),
        ({"assign": "random"}, "cacher.assign must be one of contiguous, locality, own, got 'random'"),
    ],
)
def test_a_spec_that_cannot_be_planned_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_spec(dataclasses.replace(SPEC, **change))  # type: ignore[arg-type]
