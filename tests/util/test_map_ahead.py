from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bagpipe.util.map_ahead import map_ahead


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_results_come_in_order_and_items_are_taken_so_far_ahead(ahead: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(6):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as pool:
        for number, result in enumerate(map_ahead(pool, lambda item: item * item, items(), ahead)):
            assert result == number * number
            assert len(taken) == min(6, number + 1 + ahead)


def test_the_first_error_ends_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        results = map_ahead(pool, lambda item: 1 // item, [1, 0, 1], 2)
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)
        assert list(results) == []
