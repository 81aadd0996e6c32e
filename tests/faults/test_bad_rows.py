"""A file with every kind of bad row serves the same good rows for any division among readers."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.criteo import CriteoSource
from data.loader import LookaheadLoader
from data.testing import assert_same_batches, check_resume
from tests.data.files import criteo_line, criteo_lines
from tests.data.test_criteo import BAD

#: In addition to those of the reader's own tests. A byte order mark can only stand at the beginning of the file.
MORE_BAD = (
    b"\xef\xbb\xbf" + criteo_line(),
    criteo_line(dense="nan"),
    criteo_line(dense="inf"),
    criteo_line(dense="1e3"),
    criteo_line(dense=str(2**63)),
    criteo_line(label="nan"),
    criteo_line(sparse="0x1f"),
    criteo_line().replace(b"\t", b","),
    b"\0" * 200,
    b"\xff\xfe" * 50,
    b"\t" * 39 + b"\t",
    b"9" * 100_000,
)
GOOD = criteo_lines(60).split(b"\n")[:-1]
BAD_LINES = [*MORE_BAD, *(line for line, _ in BAD)]


def text() -> bytes:
    """Alternating text of a good line, a bad one and a good one; the good lines in order."""
    lines = list(GOOD)
    for number, line in enumerate(BAD_LINES):
        lines.insert(3 * number + 1, line)
    return b"\n".join(lines) + b"\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "good.tsv").write_bytes(b"\n".join(GOOD) + b"\n")
    (folder / "mixed.tsv").write_bytes(text())
    (folder / "mixed.tsv.gz").write_bytes(gzip.compress(text()))
    return folder


def served(source: CriteoSource, **options: Any) -> tuple[list[Batch], int]:
    """Batches and number of skipped rows."""
    with LookaheadLoader(source, batch_size=16, **options) as loader:
        return list(loader), loader.skipped_rows()


@pytest.mark.parametrize("line", MORE_BAD, ids=[repr(line[:16]) for line in MORE_BAD])
def test_every_bad_row_stops_a_job_that_does_not_skip(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "one.tsv"
    path.write_bytes(GOOD[0] + b"\n" + line + b"\n")
    with pytest.raises(InputError, match=r"one\.tsv:2: expected"):
        served(CriteoSource(files=(str(path),)))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(block_bytes=st.integers(50, 5000) | st.just(1 << 20), packed=st.booleans())
def test_any_division_of_the_file_gives_the_same_batches(folder: Path, block_bytes: int, packed: bool) -> None:
    expected, _ = served(CriteoSource(files=(str(folder / "good.tsv"),)))
    file = folder / ("mixed.tsv.gz" if packed else "mixed.tsv")
    batches, skipped = served(CriteoSource(files=(str(file),), bad_rows="skip", block_bytes=block_bytes))
    assert_same_batches(batches, expected)
    assert skipped == len(BAD_LINES)


def test_processes_and_resumed_readers_give_the_same_batches(folder: Path) -> None:
    expected, _ = served(CriteoSource(files=(str(folder / "good.tsv"),)))
    source = CriteoSource(files=(str(folder / "mixed.tsv"),), bad_rows="skip", block_bytes=700)
    batches, skipped = served(source, workers=2)
    assert_same_batches(batches, expected)
    assert skipped == len(BAD_LINES)
    check_resume(lambda state: LookaheadLoader(source, batch_size=16, state=state))
