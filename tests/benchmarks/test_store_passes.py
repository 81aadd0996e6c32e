"""The functions whose time `benchmarks.store.passes` counts exist, and are themselves again afterwards."""

from __future__ import annotations

from benchmarks.store.passes import PASSES, counting


def test_passes_name_functions_of_the_store() -> None:
    before = [getattr(owner, name) for functions in PASSES.values() for owner, name in functions]
    with counting() as clock:
        inside = [getattr(owner, name) for functions in PASSES.values() for owner, name in functions]
        assert not set(before) & set(inside)
        clock.wrap("outer", lambda: clock.wrap("inner", lambda: None)())()
        assert clock.seconds.keys() == {"outer", "inner"}
        clock.reset()
        assert not clock.seconds
    assert [getattr(owner, name) for functions in PASSES.values() for owner, name in functions] == before
