"""Looks of policies."""

from __future__ import annotations

from data.replay.report.looks import look_of
from tests.data.replay.report.samples import POLICIES


def test_policies_look_different_and_the_same_in_all_reports():
    looks = [look_of(policy) for policy in POLICIES]
    assert len({look.color for look in looks}) == len({look.symbol for look in looks}) == len(POLICIES)
    strangers = ("mine", "drop-unused", "yours")
    assert look_of("drop-unused", strangers) == look_of("drop-unused")
    assert look_of("mine", strangers) != look_of("yours", strangers)
