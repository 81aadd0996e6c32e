from __future__ import annotations

import pytest

from bagpipe.errors import ChangedRowError
from bagpipe.jobs.row_check import RowCheck
from bagpipe.store.row_sums import RowSums


def test_the_changes_of_all_ranks_count() -> None:
    check = RowCheck("store.namespace 'x'", resumed_step=None)
    check.first_sums = RowSums.of([10, 20])
    check.compare(RowSums.of([13, 19]), [RowSums.of([1, -3]), RowSums.of([2, 2])])
    with pytest.raises(ChangedRowError, match=r"'x': 1 of 2 buckets \(1\) do not .* train anew, in another"):
        check.compare(RowSums.of([13, 18]), [RowSums.of([1, -3]), RowSums.of([2, 2])])


def test_the_error_names_the_checkpoints_and_few_buckets() -> None:
    check = RowCheck("store.namespace 'x'", resumed_step=40)
    check.first_sums = RowSums(12)
    with pytest.raises(ChangedRowError) as failed:
        check.compare(RowSums.of(range(12)), [])
    message = str(failed.value)
    assert "11 of 12 buckets (1, 2, 3, 4, 5, 6, 7, 8, ...)" in message
    assert "checkpoints after step 40 may hold rows trained from these; started again, the job resumes" in message


def test_nothing_is_compared_with_unknown_sums() -> None:
    RowCheck("store.namespace 'x'", resumed_step=None).compare(RowSums.of([5]), [RowSums.of([4])])
