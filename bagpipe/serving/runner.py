"""`load`, `Scorer`: the reference runner of an export. It needs torch and numpy, no torchrec, fbgemm or bagpipe job.

ids by feature ──RowClient──> vectors ──pool──> [n, dim] by column ─┐
numbers ────────────────────────────────────────────────────────────┴──dense.pt2──> logits ──sigmoid──> scores
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.serving.manifest import PROGRAM_FILE, ExportManifest, file_checksum, read_manifest
from bagpipe.serving.pooling import Bags, pool
from bagpipe.serving.row_client import RowClient
from bagpipe.util.utf8_path import utf8_path

__all__ = ["Scorer", "load"]


class Scorer:
    """An exported model. Context manager; one thread at a time.

    Args:
        manifest: of the export.
        program: ``program(dense, vectors) -> logits of each head``.
        rows: its rows.

    Attributes:
        manifest: names of numbers (``data.dense``), features and tables, and how it was trained.
        rows: vectors of single ids.
    """

    def __init__(self, manifest: ExportManifest, program: Any, rows: RowClient) -> None:
        self.manifest = manifest
        self.rows = rows
        self._program = program
        self._dtype = TORCH_DTYPE[manifest.rows.row_type.compute]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, features: Mapping[str, Bags | NDArray[np.int64]], dense: NDArray[Any] | None = None) -> Any:
        """Scores float64 ``[n]``: the sigmoid of the first head's logits, as in `trainer predict`. See `logits`."""
        scores: NDArray[np.float64] = self.logits(features, dense)[0].double().sigmoid().numpy()
        return scores

    def logits(
        self, features: Mapping[str, Bags | NDArray[np.int64]], dense: NDArray[Any] | None = None
    ) -> tuple[Tensor, ...]:
        """Logits ``[n]`` of each head.

        Args:
            features: ids of every feature of the data; an int64 array ``[n]`` has one id for each example.
            dense: numbers ``[n, number of dense columns]``, as the reader gives them; None if the data has none.

        Raises:
            InputError: a feature is missing, or a length, dtype or id is wrong.
            StoreError: the store failed.
        """
        vectors = self.pooled(features)
        num_examples = len(next(iter(vectors.values())))
        names = self.manifest.data.dense
        # A model of data without numbers gets a constant one.
        numbers = np.asarray(dense) if names else np.ones((num_examples, 1), np.float32)
        if numbers.shape != (num_examples, max(1, len(names))):
            got = "none" if dense is None else str(list(numbers.shape))
            raise InputError(f"expected numbers [{num_examples}, {len(names)}] of {', '.join(names)}, got {got}")
        # Copied to torch's memory: the sums of matrix products depend on the alignment of their operands.
        with torch.no_grad():
            heads: tuple[Tensor, ...] = self._program(torch.tensor(numbers).to(self._dtype), vectors)
        return heads

    def pooled(self, features: Mapping[str, Bags | NDArray[np.int64]]) -> dict[str, Tensor]:
        """Vectors ``[n, dim]`` by column: the inputs of the program. Raises as `logits`."""
        columns = self.manifest.columns
        missing = sorted({column.feature for column in columns} - features.keys())
        if missing:
            raise InputError(f"feature {missing[0]!r} is missing, got {sorted(features)}")
        bags = {name: Bags.of(name, features[name]) for name in dict.fromkeys(column.feature for column in columns)}
        sizes = {name: len(own.lengths) for name, own in bags.items()}
        if len(set(sizes.values())) > 1:
            raise InputError(f"features must have equal numbers of examples, got {sizes}")
        by_table: dict[str, dict[str, None]] = {}
        for column in columns:
            by_table.setdefault(column.table, {})[column.feature] = None
        wanted = {table: np.concatenate([bags[name].ids for name in names]) for table, names in by_table.items()}
        read = self.rows.read(wanted)
        vectors: dict[tuple[str, str], Tensor] = {}
        for table, names in by_table.items():
            ends = np.cumsum([len(bags[name].ids) for name in names])
            for name, part in zip(names, np.split(read[table], ends[:-1]), strict=True):
                vectors[table, name] = torch.tensor(part)
        return {
            column.name: pool(
                vectors[column.table, column.feature], bags[column.feature], column.pooling, weighted=column.weighted
            )
            for column in columns
        }

    def close(self) -> None:
        """Close the connections to a store."""
        self.rows.close()


def load(
    folder: str | Path, *, store_url: str = "", namespace: str = "", timeout_s: float = 5.0, verify: bool = False
) -> Scorer:
    """An exported model that scores examples.

    Args:
        folder: of the export.
        store_url: read the rows from this store instead of the files; needed if the export has no rows.
        namespace: `store.namespace` of the job; with `store_url`.
        timeout_s: deadline of one read from the store.
        verify: compare all checksums, which reads all rows once. The program's is compared always.

    Raises:
        InputError: it is no whole export, it has no program, or the store is unusable or holds other rows.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest.program:
        raise InputError(f"{folder} has no program: {manifest.no_program}; its rows can be read (RowClient)")
    path = folder / PROGRAM_FILE
    if file_checksum(path) != manifest.files[PROGRAM_FILE].sha256:
        raise InputError(f"{path} does not match its checksum")
    _check_no_pickle(path)
    if store_url:
        rows = RowClient.connect(store_url, namespace=namespace, timeout_s=timeout_s, expected=manifest.rows)
    else:
        rows = RowClient.open(folder, verify=verify)
    with utf8_path(path) as readable:
        program = torch.export.load(readable)
    return Scorer(manifest, program.module(), rows)


def _check_no_pickle(path: Path) -> None:
    """Raise InputError if torch would unpickle a part of a program. An export's has none."""
    try:
        with zipfile.ZipFile(path) as file:
            for item in file.infolist():
                is_config = item.filename.endswith("_config.json")
                has_pickle = item.file_size > 0 and item.filename.endswith(".pt")
                if has_pickle or (is_config and b'"use_pickle": true' in file.read(item)):
                    raise InputError(f"{path}: {item.filename} holds a pickle, which an export never does")
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no program of torch.export: {error}") from None
