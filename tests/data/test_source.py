from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from data.criteo import CriteoSource
from data.row_order import RowIndex
from data.schema_file import criteo_schema
from data.source import Source, check_bad_rows, file_version
from data.synthetic import SyntheticSource
from data.synthetic_options import options_at
from tests.data.files import criteo_lines


def test_rows_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(criteo_lines(30))
    (tmp_path / "b.gz").write_bytes(gzip.compress(criteo_lines(20)))
    options = options_at("")
    sources: list[Source] = [
        CriteoSource.at(str(tmp_path), block_bytes=2000),
        SyntheticSource(schema=options.schema, features=options.features, rows=50),
    ]
    assert [[Path(file).name for file in source.files] for source in sources] == [["a", "b.gz"], []]
    for source in sources:
        assert RowIndex.scan(source, source.segments(), None).num_rows == 50
        bounds = (0, 1, 29, 30, 31, 50, 99)
        counted = [RowIndex.scan(source, source.segments(), bound).num_rows for bound in bounds]
        assert list(map(min, counted, bounds)) == [0, 1, 29, 30, 31, 50, 50]
        assert counted[-1] == 50


def test_policies() -> None:
    assert [check_bad_rows(policy) for policy in ("stop", "skip")] == ["stop", "skip"]
    with pytest.raises(InputError, match=r"data\.bad_rows must be one of stop, skip, got ''"):
        check_bad_rows("")


def test_sources_can_be_compared_and_hashed() -> None:
    assert CriteoSource(files=("a",)) == CriteoSource(files=("a",), schema=criteo_schema())
    assert len({CriteoSource(files=("a",)), CriteoSource(files=("a",)), CriteoSource(files=("b",))}) == 2


def test_a_file_written_anew_is_another_version(tmp_path: Path) -> None:
    """Even within one clock tick."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    before = file_version(str(path))
    assert file_version(str(path)) == before
    (tmp_path / "b").write_bytes(b"two")
    os.utime(tmp_path / "b", ns=(before.modified_ns, before.modified_ns))
    os.replace(tmp_path / "b", path)
    assert file_version(str(path)) != before
