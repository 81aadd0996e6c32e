"""Links of rows to their previous use in the window."""

from __future__ import annotations

import numpy as np

from bagpipe.oracle.handles import HashHandles
from bagpipe.oracle.links import LinkedHandles, LinkFinder
from bagpipe.oracle.plan import RowList


def rows_of(*tables: str) -> RowList:
    """A letter is an id."""
    return RowList(
        table_offsets=np.cumsum([0, *map(len, tables)]), ids=np.array([ord(i) for ids in tables for i in ids], np.int64)
    )


def test_a_link_names_the_latest_use_that_the_window_still_holds() -> None:
    finder = LinkFinder(lookahead=3)
    batches = [("ab", "a"), ("b", ""), ("ab", "ax"), ("c", "a"), ("a", "x"), ("", "")]
    links = [finder.find(rows_of(*tables), number) for number, tables in enumerate(batches)]
    found = [list(zip(link.back.tolist(), link.place.tolist(), strict=True)) for link in links]
    #: (batches back, place in the table there) of each row; (0, 0): none.
    assert found == [
        [(0, 0), (0, 0), (0, 0)],
        [(1, 1)],
        [(2, 0), (1, 0), (2, 0), (0, 0)],
        [(0, 0), (1, 0)],
        [(2, 0), (2, 1)],
        [],
    ]


def test_links_do_not_depend_on_where_they_begin() -> None:
    rng = np.random.default_rng(0)
    batches = [rows_of("".join(sorted(set(map(chr, rng.integers(97, 123, 9)))))) for _ in range(12)]
    whole, late = LinkFinder(lookahead=4), LinkFinder(lookahead=4)
    links = [whole.find(rows, number) for number, rows in enumerate(batches)]
    again = [late.find(rows, number) for number, rows in enumerate(batches) if number >= 5]
    for one, other in zip(links[8:], again[3:], strict=True):  # the window of batch 8 begins with batch 5
        assert (one.back.tolist(), one.place.tolist()) == (other.back.tolist(), other.place.tolist())


def test_links_to_batches_before_the_planner_began_are_none() -> None:
    finder, handles = LinkFinder(lookahead=4), HashHandles()
    linked = LinkedHandles(handles, num_tables=1, lookahead=4)
    finder.find(rows_of("ab"), 0)
    links = finder.find(rows_of("ab"), 1)
    assert links.back.tolist() == [1, 1]
    assert linked.lookup_or_add(rows_of("ab"), links, 1, window_start=1).tolist() == [0, 1]


def test_linked_rows_have_the_handles_of_a_lookup() -> None:
    """Over many turns of the ring, which grows meanwhile."""
    lookahead, rng = 5, np.random.default_rng(1)
    finder, lookups, handles = LinkFinder(lookahead), HashHandles(), HashHandles()
    linked = LinkedHandles(handles, num_tables=2, lookahead=lookahead)
    for number in range(60):
        ids = [np.unique(rng.integers(0, 9_000, 20 * (number + 1))) for _ in range(2)]
        rows = RowList(table_offsets=np.cumsum([0, *map(len, ids)]), ids=np.concatenate(ids))
        found = linked.lookup_or_add(rows, finder.find(rows, number), number, window_start=0)
        assert found.tolist() == lookups.lookup_or_add(rows).tolist()
