"""Names of the rows that a job begins with, as its cacher reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.row_file import save_names
from bagpipe.errors import InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.schema import DataSchema, Feature, Table
from cacher.known_rows import check_known_rows, known_rows

NAME = "generation-000002/known-rows.npy"

SCHEMA = DataSchema(
    label="label",
    dense=(),
    features=tuple(Feature(name=name, table=table) for name, table in (("x", "a"), ("y", "b"), ("z", "a"))),
    tables=(Table(name="a", rows=None), Table(name="b", rows=None)),
)
#: Two tables of the model read table a of the data; they have the number of its columns and one more.
SPEC = OracleSpec(
    table_rows=(None, None, None),
    features=tuple(FeatureRef(feature=f, table=t) for f, t in ((0, 0), (2, 0), (1, 1), (0, 2), (2, 2))),
    num_slots=8,
    lookahead=1,
)


def test_rows_of_all_tables_that_read_one_of_the_data(tmp_path: Path) -> None:
    (tmp_path / NAME).parent.mkdir()
    tables, ids = [0, 0, 1, 2, 2], [-3, 4, 4, 4, 9]
    save_names(tmp_path / NAME, np.array(tables, np.uint32), np.array(ids, np.int64))
    found = known_rows(NAME, str(tmp_path), SPEC, SCHEMA)
    assert found is not None
    assert found.table_offsets.tolist() == [0, 3, 4]
    assert found.ids.tolist() == [4, 9, -3, 4]  # ascending as unsigned numbers
    assert known_rows("", str(tmp_path), SPEC, SCHEMA) is None


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_a_cacher_without_the_jobs_folder_says_what_it_needs(folder: str) -> None:
    with pytest.raises(InputError, match=rf"expected {NAME} in the cacher's checkpoint.dir, got {folder or 'none'}: "):
        known_rows(NAME, folder, SPEC, SCHEMA)


def test_another_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).parent.mkdir()
    np.save(tmp_path / NAME, np.arange(9))
    with pytest.raises(InputError, match="got other content"):
        known_rows(NAME, str(tmp_path), SPEC, SCHEMA)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../generation-000002/known-rows.npy", "generation-000002/start", f"{NAME}\n", "known-rows.npy"],
)
def test_a_request_names_nothing_else(name: str) -> None:
    with pytest.raises(InputError, match="known rows: expected a file generation-"):
        check_known_rows(name)


def test_none_and_its_own_are_allowed() -> None:
    check_known_rows("")
    check_known_rows(NAME)
