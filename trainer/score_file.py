"""`ScoreFile`: the scores of examples in a Parquet or CSV file, in the order of the data.

columns: ``example`` (number in the data, from 0), ``label``, ``logit``, ``score`` (its sigmoid)
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from torch import Tensor

from bagpipe.errors import InputError, JobError
from bagpipe.util.outputs import reason_of

__all__ = ["ScoreFile"]

_SCHEMA = pa.schema(
    [("example", pa.int64()), ("label", pa.float64()), ("logit", pa.float64()), ("score", pa.float64())]
)
#: By suffix of the file's name.
_WRITERS = {".parquet": pyarrow.parquet.ParquetWriter, ".csv": pyarrow.csv.CSVWriter}


class ScoreFile:
    """Writes scores batch by batch. Context manager; the file has its name after `publish`, else nothing is left.

    Args:
        path: of the file.

    Attributes:
        num_examples: written so far.

    Raises:
        InputError: the name ends with neither .parquet nor .csv.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in _WRITERS:
            raise InputError(f"--out must end with one of {', '.join(_WRITERS)}, got {path.name}")
        self.num_examples = 0
        self._path = path.resolve()
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._writer: Any = None

    def __enter__(self) -> Self:
        try:
            self._writer = _WRITERS[self._path.suffix](str(self._partial), _SCHEMA)
        except OSError as error:
            raise JobError(f"cannot write {self._path}: {reason_of(error)}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._writer.close()
        self._partial.unlink(missing_ok=True)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Write the logits and labels ``[n]`` of the next examples.

        Raises:
            JobError: the file cannot be written.
        """
        first, self.num_examples = self.num_examples, self.num_examples + len(logits)
        values = logits.double().reshape(-1)
        columns = {
            "example": np.arange(first, self.num_examples),
            "label": labels.double().reshape(-1).numpy(),
            "logit": values.numpy(),
            "score": values.sigmoid().numpy(),
        }
        try:
            self._writer.write_table(pa.table(columns, schema=_SCHEMA))
        except OSError as error:
            raise JobError(f"cannot write {self._path}: {reason_of(error)}") from None

    def publish(self) -> None:
        """Give the file its name, in place of one that exists.

        Raises:
            JobError: the file cannot be written.
        """
        try:
            self._writer.close()
            os.replace(self._partial, self._path)
        except OSError as error:
            raise JobError(f"cannot write {self._path}: {reason_of(error)}") from None
