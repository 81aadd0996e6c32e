from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from data.criteo import CriteoSource, explain_line
from data.criteo_writer import write_criteo_text
from data.loader import LookaheadLoader
from data.synthetic import SyntheticSource
from data.synthetic_options import options_at
from data.testing import assert_same_batches, read_all


def source(rows: int, tables: int = 26) -> SyntheticSource:
    options = options_at("", tables=tables)
    return SyntheticSource(schema=options.schema, features=options.features, rows=rows, seed=3)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_text_reads_back_as_the_source_itself(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert write_criteo_text(source(500), str(path)) == path.stat().st_size
    assert_same_batches(
        read_all(LookaheadLoader(CriteoSource.at(str(path)), batch_size=64)),
        read_all(LookaheadLoader(source(500), batch_size=64)),
    )
    first = path.read_bytes()
    write_criteo_text(source(500), str(path))
    assert path.read_bytes() == first


def test_lines_look_like_criteos(tmp_path: Path) -> None:
    write_criteo_text(source(200), str(tmp_path / "a.gz"))
    lines = gzip.decompress((tmp_path / "a.gz").read_bytes()).split(b"\n")
    assert lines.pop() == b""
    assert len(lines) == 200
    assert all(explain_line(line) is None for line in lines)
    integers = [field for line in lines for field in line.split(b"\t")[1:14]]
    assert b"" in integers
    assert b"0" in integers
    assert not any(field.startswith(b"0") and field != b"0" for field in integers)


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Criteo's text has 13 dense columns and 26 features of one id, got 13 and 3"):
        write_criteo_text(source(5, tables=3), str(tmp_path / "a.tsv"))
    with pytest.raises(InputError, match=r"cannot write /nowhere/a\.tsv"):
        write_criteo_text(source(5), "/nowhere/a.tsv")
    assert list(tmp_path.iterdir()) == []
