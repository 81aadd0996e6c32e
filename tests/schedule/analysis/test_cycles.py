from __future__ import annotations

import dataclasses
from fractions import Fraction

from bagpipe.schedule.analysis.cycles import delay_free_cycle, positive_cycle
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.loop import LoopDependency
from bagpipe.schedule.ir.program import Edge


def test_a_cycle_without_delay_is_found_in_waiting_order() -> None:
    loop = prefetch_loop(prefetch_depth=1, read_ahead=1, write_depth=1)
    assert delay_free_cycle(loop) == ()
    # Eviction of batch b after the update of batch b, which needs the insertion that follows the eviction.
    dead = dataclasses.replace(loop, edges=(*loop.edges, Edge(src="X_UPDATE", dst="X_EVICT")))
    cycle = [dead.templates[number][1].op for number in delay_free_cycle(dead)]
    start = cycle.index("X_EVICT")
    assert [*cycle[start:], *cycle[:start]] == ["X_EVICT", "X_UPDATE", "B", "F", "X_INSERT"]


def test_only_cycles_of_positive_weight_count() -> None:
    path = [LoopDependency(src=a, dst=b, turns=0, edge=None) for a, b in ((0, 1), (1, 2), (2, 0))]
    assert positive_cycle(path, [Fraction(1), Fraction(1), Fraction(-2)], 3) == ()
    found = positive_cycle(path, [Fraction(1), Fraction(1), Fraction(-1)], 3)
    assert sorted(d.src for d in found) == [0, 1, 2]
