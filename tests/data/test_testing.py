"""The conformance suite of readers detects each violation that it checks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from data.criteo import CriteoSource
from data.loader import LookaheadLoader
from data.source import Block
from data.testing import assert_same_batches, check_resume, check_source, read_all
from tests.data.files import criteo_lines


@pytest.fixture
def source(tmp_path: Path) -> CriteoSource:
    (tmp_path / "a.tsv").write_bytes(criteo_lines(20))
    return CriteoSource.at(str(tmp_path / "a.tsv"))


def test_differences_are_noticed(source: CriteoSource) -> None:
    batches = read_all(LookaheadLoader(source, batch_size=10))
    assert_same_batches(batches, batches)
    first = batches[0]
    changes: list[dict[str, Any]] = [
        {"index": 5},
        {"labels": 1 - first.labels},
        {"dense": first.dense.astype("f8")},
        {"values": first.values[::-1].copy()},
        {"lengths": first.lengths[:, ::-1].copy()},
        {"weights": first.labels},
    ]
    for change in changes:
        with pytest.raises(AssertionError, match=f"{next(iter(change))} differs"):
            assert_same_batches([dataclasses.replace(first, **change), batches[1]], batches)
    with pytest.raises(ValueError, match="zip"):
        assert_same_batches(batches[:1], batches)


def test_a_loader_that_loses_its_position_is_detected(source: CriteoSource) -> None:
    with pytest.raises(AssertionError, match="restoring changes the position"):
        check_resume(lambda state: LookaheadLoader(source, batch_size=6))


def test_a_reader_that_locates_no_row_is_detected(source: CriteoSource) -> None:
    class Lost(CriteoSource):
        def locate(self, block: Block, row: int) -> str:
            return block.file

    with pytest.raises(AssertionError):
        check_source(Lost(files=source.files))
