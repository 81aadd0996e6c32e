"""Writes synthetic examples as Criteo's text, whole blocks at a time, through a matrix of characters and a mask.

    [rows, width] characters, every field at its widest ──drop leading zeros, missing fields──> bytes of the lines

Reading the text back gives the batches of the synthetic source, bit for bit.
"""

from __future__ import annotations

import gzip
import io
import os
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.util.outputs import written_whole
from data.criteo import NUM_DENSE, NUM_SPARSE
from data.synthetic import RawBlock, SyntheticSource

__all__ = ["format_block", "write_criteo_text"]

_DECIMAL_DIGITS = 10
_HEX_DIGITS = 10  # synthetic ids have up to 40 bits
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def _digits(numbers: NDArray[np.int64], base: int, width: int) -> NDArray[np.uint8]:
    """uint8 characters ``[n, width]``, zero-padded."""
    powers = np.array([base**position for position in range(width - 1, -1, -1)], np.int64)
    characters: NDArray[np.uint8] = _HEX[(numbers[:, None] // powers) % base]
    return characters


def format_block(raw: RawBlock) -> bytes:
    """The lines of a block with 13 dense columns and 26 one-hot features of at most 40-bit ids."""
    rows = raw.labels.shape[0]
    fields = [raw.labels.astype(np.uint8)[:, None] + np.uint8(ord("0"))]
    keep = [np.ones((rows, 1), np.bool_)]
    tab = np.full((rows, 1), ord("\t"), np.uint8)
    always = np.ones((rows, 1), np.bool_)
    for column in range(NUM_DENSE):
        numbers, present = raw.counts[:, column], raw.dense_present[:, column, None]
        digits = _digits(numbers, 10, _DECIMAL_DIGITS)
        significant = np.maximum.accumulate(digits != ord("0"), axis=1)
        significant[:, -1] = True
        fields += [tab, digits]
        keep += [always, significant & present]
    for feature in range(NUM_SPARSE):
        present = raw.lengths[feature] > 0
        ids = np.zeros(rows, np.int64)
        ids[present] = raw.ids[feature]
        fields += [tab, _digits(ids, 16, _HEX_DIGITS)]
        keep += [always, np.repeat(present[:, None], _HEX_DIGITS, axis=1)]
    fields.append(np.full((rows, 1), ord("\n"), np.uint8))
    keep.append(always)
    characters: NDArray[np.uint8] = np.concatenate(fields, axis=1)[np.concatenate(keep, axis=1)]
    return characters.tobytes()


def write_criteo_text(source: SyntheticSource, path: str) -> int:
    """Write all examples, gzipped if the name ends in .gz; the file appears when complete. Returns its bytes.

    Raises:
        InputError: the source does not have Criteo's shape, or the file cannot be written.
    """
    num_dense, num_sparse = len(source.schema.dense), len(source.schema.features)
    if num_dense != NUM_DENSE or num_sparse != NUM_SPARSE or source.multi_hot:
        raise InputError(
            f"Criteo's text has {NUM_DENSE} dense columns and {NUM_SPARSE} features of one id, got {num_dense} and "
            f"{num_sparse}{' with bags' if source.multi_hot else ''}: write .arrow or .parquet"
        )
    if len(source.schema.labels) > 1 or source.schema.example_weight or source.clock is not None:
        raise InputError("Criteo's text has one label, no weights of examples and no times: write .arrow or .parquet")
    with written_whole(path) as partial, open(partial, "wb") as raw, _compressed(raw, path) as stream:
        for segment in source.segments():
            for block in source.blocks(segment):
                stream.write(format_block(source.draw(block)))
    return os.path.getsize(path)


def _compressed(raw: BinaryIO, path: str) -> BinaryIO:
    if not path.endswith(".gz"):
        return cast(BinaryIO, io.BufferedWriter(cast(io.RawIOBase, raw)))
    # Without time stamp and name, so that equal data gives equal files. Level 1 is five times as fast as the default.
    return cast(BinaryIO, gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0))
