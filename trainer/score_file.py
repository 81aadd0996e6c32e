"""`ScoreFile`: the scores of examples in a Parquet or CSV file, in the order of the data.

columns: ``example`` (number in the data, from 0), ``label`` (null: there is none), ``logit``, ``score`` (its sigmoid);
         with several labels ``label_click``, ``logit_click``, ``score_click``, ``label_buy``, … by their names
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
from bagpipe.training.evaluation import OnScores
from bagpipe.util.outputs import reason_of
from trainer.tasks import Tasks

__all__ = ["ScoreFile"]

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
        self._sink: Any = None
        self._writer: Any = None
        self._tasks: Tasks
        self._schema: pa.Schema

    def __enter__(self) -> Self:
        return self

    def begin(self, tasks: Tasks) -> OnScores:
        """Open the file for the scores of some labels. Returns `add`.

        Raises:
            JobError: the file cannot be written.
        """
        endings = [""] if len(tasks.labels) == 1 else [f"_{label}" for label in tasks.labels]
        names = [f"{kind}{ending}" for ending in endings for kind in ("label", "logit", "score")]
        self._tasks = tasks
        self._schema = pa.schema([("example", pa.int64()), *((name, pa.float64()) for name in names)])
        try:
            # bytes: the names of files need not be UTF-8
            self._sink = pa.OSFile(os.fsencode(self._partial), "wb")
            self._writer = _WRITERS[self._path.suffix](self._sink, self._schema)
        except OSError as error:
            raise JobError(f"cannot write {self._path}: {reason_of(error)}") from None
        return self.add

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
        if self._sink is not None:
            self._sink.close()
        with suppress(OSError):
            self._partial.unlink()

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Write the logits and labels of the next examples; see `Tasks.split`. A label that is NaN is null.

        Raises:
            JobError: the file cannot be written.
        """
        first, self.num_examples = self.num_examples, self.num_examples + len(logits)
        values, targets, _ = self._tasks.split(logits.double(), labels.double())
        columns = [pa.array(np.arange(first, self.num_examples))]
        for number in range(values.shape[1]):
            columns.append(pa.array(targets[:, number].numpy(), from_pandas=True))
            columns.append(pa.array(values[:, number].numpy()))
            columns.append(pa.array(values[:, number].sigmoid().numpy()))
        try:
            self._writer.write_table(pa.table(columns, schema=self._schema))
        except OSError as error:
            raise JobError(f"cannot write {self._path}: {reason_of(error)}") from None

    def publish(self) -> None:
        """Give the file its name, in place of one that exists.

        Raises:
            JobError: the file cannot be written.
        """
        try:
            self._writer.close()
            self._sink.close()
            os.replace(self._partial, self._path)
        except OSError as error:
            raise JobError(f"cannot write {self._path}: {reason_of(error)}") from None
