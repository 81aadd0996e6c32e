"""`RowLoading`: the methods of `TrainPipeline` that give the rows to begin with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from bagpipe.train_pipeline.error_texts import speaks_arguments
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.row_sources import TensorRows, namespace_rows, rows_of_file
from bagpipe.train_pipeline.session import Session

__all__ = ["RowLoading"]


@speaks_arguments
class RowLoading:
    """A part of `TrainPipeline`."""

    _parts: ModelParts
    _options: Options
    _session: Session

    def load_rows(
        self,
        table: str,
        ids: Tensor | Sequence[int] | None,
        weights: Tensor,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Begin training with these rows of a table; rows not given begin with their initial values.

        They are written to the store with the first batch, or before the first evaluation, and belong to the first
        checkpoint. A job that resumes a checkpoint has its own, and leaves these out. All ranks call this; rank 0
        writes.

        Args:
            table: its name.
            ids: ``[n]`` integers of any type, distinct; None: 0 to n - 1.
            weights: ``[n, dim]``, converted to the dtype of the rows. Kept until they are written.
            state: optimizer state by torch's names: ``sum``, or ``exp_avg`` and ``exp_avg_sq``, ``[n, dim]``; of
                row-wise Adagrad ``sum`` ``[n]``. None: zero.

        Raises:
            InputError: they do not fit the table, or training has begun.
        """
        self._session.load(TensorRows(self._parts.rows, table, ids, weights, state))

    def load_rows_from(
        self, path: str | Path, tables: Collection[str] | None = None, *, state: str | Path | None = None
    ) -> list[str]:
        """Begin training with the rows of a safetensors file, such as that of `export`; see `load_rows`.

        Args:
            path: file with weights ``….embedding_bags.<table>.weight`` or ``….embeddings.<table>.weight`` ``[n, dim]``,
                and maybe ``.ids`` int64 ``[n]`` beside them. Read when the rows are written.
            tables: names of the tables to take; None: all that model and file have.
            state: file with optimizer state, ``….<table>.weight.<state>``; None: zero.

        Returns:
            Names of the tables taken.

        Raises:
            InputError: a file cannot be read or lacks a table, rows do not fit, or training has begun.
        """
        found = rows_of_file(self._parts.rows, Path(path), tables, None if state is None else Path(state))
        for rows in found.values():
            self._session.load(rows)
        return list(found)

    def load_rows_of(self, namespace: str, *, store: str | None = None) -> None:
        """Begin training with copies of another namespace's rows and their optimizer state; see `load_rows`.

        Args:
            namespace: its name. Tables, dimensions, optimizers and types are those of this model; the other job rests.
            store: URL of its store; None: that of the pipeline.

        Raises:
            InputError: training has begun, or rows decay, which are at steps of the other job; later, when the rows are
                written: there are none, or they do not fit.
        """
        self._session.load(namespace_rows(self._parts.rows, self._options, namespace, store))
