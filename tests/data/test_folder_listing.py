"""Which files of a growing folder can be read, in which order, and when no more can come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.folder_listing import Entry, FollowRule, Listing, arrived, listed, order_key

MARKER = FollowRule(by_marker=True, age_s=0.0)
AGE = FollowRule(by_marker=False, age_s=30.0)


def entries(text: str) -> list[Entry]:
    """``day_1@100``: a file modified at second 100."""
    pairs = [item.split("@") for item in text.split()]
    return [Entry(name=name, modified_s=float(time)) for name, time in pairs]


@pytest.mark.parametrize(
    ("rule", "folder", "now_s", "files", "num_complete", "is_over"),
    [
        (MARKER, "", 200, "", 0, False),
        (MARKER, "day_0@0", 200, "day_0", 0, False),
        (MARKER, "day_0@0 _DONE.day_0@9", 200, "day_0", 1, False),
        # natural order; what is not complete holds back the files after it
        (MARKER, "d10@0 d9@0 _DONE.d10@1", 200, "d9 d10", 0, False),
        (MARKER, "d10@0 d9@0 _DONE.d10@1 _DONE.d9@1", 200, "d9 d10", 2, False),
        # names that are equal in natural order have one order
        (MARKER, "d1@0 d01@0", 200, "d01 d1", 0, False),
        (MARKER, "d01@0 d1@0", 200, "d01 d1", 0, False),
        # not data
        (MARKER, ".d1.tmp@0 _d1@0 _DONE.d1@0", 200, "", 0, False),
        # the end: all is complete
        (MARKER, "d1@0 d2@0 _DONE.d1@0 _END@5", 200, "d1 d2", 2, True),
        (MARKER, "d1@0 _SUCCESS@5", 200, "d1", 1, True),
        (AGE, "d1@170 d2@171 d3@0", 200, "d1 d2 d3", 1, False),
        (AGE, "d1@170 d2@171 d3@0 _END@200", 200, "d1 d2 d3", 3, True),
        (FollowRule(by_marker=False, age_s=0.0), "d1@200", 200, "d1", 1, False),
        # the time at which a stream ends
        (FollowRule(by_marker=False, age_s=30.0, until_s=150.0), "d1@150 d2@151 _END@151", 179, "d1", 0, False),
        (FollowRule(by_marker=False, age_s=30.0, until_s=150.0), "d1@150 d2@151 _END@151", 180, "d1", 1, True),
        # a later file ends it, whatever the times of those after it
        (FollowRule(by_marker=False, age_s=30.0, until_s=150.0), "d1@150 d2@151 d3@100", 179, "d1", 0, False),
        (FollowRule(by_marker=False, age_s=30.0, until_s=150.0), "d1@150 d2@151 d3@100", 180, "d1", 1, True),
        (
            FollowRule(by_marker=True, age_s=0.0, until_s=150.0),
            "d1@0 d2@0 d3@0 _DONE.d2@150 _DONE.d3@151",
            150,
            "d1 d2 d3",
            0,
            False,
        ),
        (
            FollowRule(by_marker=True, age_s=0.0, until_s=150.0),
            "d1@0 d2@0 d3@0 _DONE.d2@150 _DONE.d3@151",
            151,
            "d2",
            1,
            True,
        ),
        (
            FollowRule(by_marker=False, age_s=0.0, suffixes=(".parquet",)),
            "a.parquet@0 b.crc@0",
            9,
            "a.parquet",
            1,
            False,
        ),
    ],
)
def test_a_listing(rule: FollowRule, folder: str, now_s: float, files: str, num_complete: int, is_over: bool) -> None:
    expected = Listing(files=tuple(files.split()), num_complete=num_complete, is_over=is_over)
    assert listed(entries(folder), rule, now_s) == expected


def listing(files: str, num_complete: int | None = None, is_over: bool = False) -> Listing:
    names = tuple(files.split())
    return Listing(files=names, num_complete=len(names) if num_complete is None else num_complete, is_over=is_over)


def test_a_file_that_the_first_listing_missed_is_not_passed_over() -> None:
    assert arrived(listing("b c"), listing("a b c"), (), "", "days") == ([], False)
    assert arrived(listing("a c"), listing("a b c", is_over=True), (), "", "days") == (["a"], False)
    assert arrived(listing("a b", is_over=True), listing("a b"), ("a",), "a", "days") == (["b"], True)


def test_a_file_that_was_read_can_be_removed_and_none_can_come_before_it() -> None:
    assert arrived(listing("c"), listing("c"), ("a", "b"), "b", "days") == (["c"], False)
    with pytest.raises(InputError, match=r"^days/a1: appeared after b was read: files are read in the order of their"):
        arrived(listing("c"), listing("a1 c"), ("a", "b"), "b", "days")


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=24, max_size=24))
def test_files_may_become_complete_in_any_order(order: list[int], looks: list[bool]) -> None:
    """All files are there; markers come in any order, with looks at any times: each is taken once, in name order."""
    there = [Entry(name=f"d{number}", modified_s=0.0) for number in range(6)]
    taken: list[str] = []
    look = iter(looks)
    for number in order:
        there.append(Entry(name=f"_DONE.d{number}", modified_s=0.0))
        if next(look):
            now = listed(there, MARKER, 0.0)
            taken += arrived(now, now, taken, taken[-1] if taken else "", "days")[0]
            assert taken == sorted(taken, key=order_key)
    now = listed(there, MARKER, 0.0)
    taken += arrived(now, now, taken, taken[-1] if taken else "", "days")[0]
    assert taken == [f"d{number}" for number in range(6)]


def test_what_is_no_data_file_is_left_out_once_it_is_settled() -> None:
    rule = FollowRule(by_marker=True, age_s=0.0, suffixes=(".parquet", ".pq"))
    folder = [
        *entries("a.PARQUET@0 b.pq@0 c.csv@100 d.parquet.tmp@150 b.pq~.pq@0 _DONE.a.PARQUET@1 .e@0"),
        Entry(name="dt=1", modified_s=0.0, is_file=False),
    ]
    found = listed(folder, rule, 170.0)
    assert (found.files, found.num_complete, found.left_out) == (
        ("a.PARQUET", "b.pq"),
        1,
        ("b.pq~.pq", "c.csv", "dt=1"),
    )
    assert listed([*folder, *entries("_END@0")], rule, 170.0).left_out == ("b.pq~.pq", "c.csv", "d.parquet.tmp", "dt=1")
