"""`known_rows`: the rows that a job begins with, from its folder of checkpoints, by the tables of the data.

    Start.known_rows ──a name below the cacher's own checkpoint.dir──> file of row names, of the tables of a model
                     ──OracleSpec: which features a table reads──────> RowList of the data's tables

Their uses were counted, or followed, by the job before. Admission and expiry take them as rows that are there.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.manifest import KNOWN_ROWS, BrokenCheckpoint
from bagpipe.checkpoint.row_file import names_in
from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.types.schema import DataSchema

__all__ = ["check_known_rows", "known_rows"]

#: Nothing else can be named: a trainer's request is untrusted.
_NAME = re.compile(rf"generation-\d{{6,12}}/{re.escape(KNOWN_ROWS)}")


def check_known_rows(name: str) -> None:
    """Raise InputError unless a request names a file of known rows, or none."""
    if name and not _NAME.fullmatch(name):
        raise InputError(f"known rows: expected a file generation-…/{KNOWN_ROWS}, got {name[:80]!r}")


def known_rows(name: str, folder: str, spec: OracleSpec, schema: DataSchema) -> RowList | None:
    """The rows of a file, by number of the data's table, ascending by id as an unsigned number; None: there is none.

    Args:
        name: in the folder; empty: there are none.
        folder: `checkpoint.dir` of the cacher.
        spec: of the job: which tables of the model read which features.
        schema: columns of the data.

    Raises:
        InputError: the cacher does not have the file, or it is none of row names.
    """
    if not name:
        return None
    path = Path(folder, name)
    if not folder or not path.is_file():
        raise InputError(
            f"the job starts from rows of another one, of which its cacher needs the names: expected {name} in the "
            f"cacher's checkpoint.dir, got {folder or 'none'}: start the cacher with the checkpoint.dir of the job, or "
            "leave cacher.url empty"
        )
    try:
        names = names_in(path)
    except BrokenCheckpoint as error:
        raise InputError(str(error)) from None
    of_model: dict[str, set[int]] = {}
    for ref in spec.features:
        of_model.setdefault(schema.features[ref.feature].table, set()).add(ref.table)
    parts: list[NDArray[np.int64]] = []
    for table in schema.tables:
        is_own = np.isin(names["table"], np.array(sorted(of_model.get(table.name, ())), dtype=np.uint32))
        ids = np.unique(names["id"][is_own].astype(np.int64).view(np.uint64)).view(np.int64)
        parts.append(ids)
    table_offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([ids.shape[0] for ids in parts], out=table_offsets[1:])
    return RowList(table_offsets=table_offsets, ids=np.concatenate([np.empty(0, np.int64), *parts]))
