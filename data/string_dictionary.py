"""`StringDictionary`: the numbered strings of a table, kept in a text file that any tool reads.

    "id","count","text"
    0,17,""               the id of every other string; occurrences of strings that were left out as too rare
    1,2034,"shoe"         ids from 1 without gaps, each string with its occurrences in the data it was built from
    2,1201,"hat, red"

The file is CSV in UTF-8. `python -m data convert --dictionaries` builds it. A lookup hashes the string, searches the
sorted hashes, and then compares the strings themselves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.util.outputs import written_whole
from bagpipe.util.programs import command_of
from data.source import FileVersion, file_version
from data.string_hash import hash_strings

__all__ = ["UNSEEN", "StringDictionary", "dictionary_at", "write_dictionary"]

#: Id of every string that the dictionary does not hold.
UNSEEN = 0

_NAMES = ["id", "count", "text"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StringDictionary:
    """Strings numbered from 1, ready for lookups.

    Attributes:
        texts: binary ``[n]``; string i has id i + 1.
        seed: of the hashes; the first one under which they differ.
        hashes: int64 ``[n]``, ascending.
        order: int64 ``[n]``, position in `texts` of each hash.
    """

    texts: pa.Array
    seed: int
    hashes: NDArray[np.int64]
    order: NDArray[np.int64]

    @classmethod
    def of(cls, texts: pa.Array) -> StringDictionary:
        """The dictionary of distinct strings.

        Raises:
            InputError: a string occurs twice.
        """
        if pc.count_distinct(texts).as_py() < len(texts):
            counts = pc.value_counts(texts)
            twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")[0].as_py()
            raise InputError(f"expected each string once, got {twice.decode(errors='backslashreplace')!r} twice")
        seed = 0
        while True:  # ends at once, except for two strings of one hash
            hashes = hash_strings(texts, seed)
            order = np.argsort(hashes, kind="stable").astype(np.int64)
            hashes = hashes[order]
            if not (hashes[1:] == hashes[:-1]).any():
                return cls(texts=texts, seed=seed, hashes=hashes, order=order)
            seed += 1

    def __len__(self) -> int:
        return len(self.texts)

    def ids_of(self, strings: pa.Array) -> NDArray[np.int64]:
        """The id of each string (binary ``[m]``, without nulls), int64 ``[m]``."""
        if not len(self):
            return np.full(len(strings), UNSEEN, np.int64)
        hashes = hash_strings(strings, self.seed)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self) - 1)
        found = self.order[places]
        same = pc.equal(self.texts.take(pa.array(found)), strings).to_numpy(zero_copy_only=False)
        return np.where(same, found + 1, UNSEEN)


def dictionary_at(path: str) -> StringDictionary:
    """The dictionary of a file; kept until the file changes.

    Raises:
        InputError: the file is missing or not a dictionary.
    """
    try:
        version = file_version(path)
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such dictionary: `{command_of('data')} convert … --dictionaries frequency` builds it"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    return _read(path, version)


@lru_cache(maxsize=64)
def _read(path: str, version: FileVersion) -> StringDictionary:
    del version  # part of the cache key only
    try:
        table = pyarrow.csv.read_csv(
            pa.OSFile(os.fsencode(path)),
            read_options=pyarrow.csv.ReadOptions(use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={"id": pa.int64(), "count": pa.int64(), "text": pa.binary()}, null_values=[]
            ),
        )
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a dictionary of strings: {' '.join(str(error).split())}") from None
    if table.column_names != _NAMES:
        raise InputError(f"{path}:1: expected the columns {','.join(_NAMES)}, got {','.join(table.column_names)}")
    ids = table.column("id").to_numpy()
    if not np.array_equal(ids, np.arange(max(len(ids), 1))):
        wrong = np.flatnonzero(ids != np.arange(len(ids)))[:1]
        got = f"{ids[wrong[0]]} as number {wrong[0]}" if wrong.size else "none"
        raise InputError(f"{path}: expected the ids 0, 1, 2, … in order, got {got}")
    texts = table.column("text").slice(1).combine_chunks()
    try:
        return StringDictionary.of(texts.chunk(0) if isinstance(texts, pa.ChunkedArray) else texts)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def write_dictionary(path: str, texts: pa.Array, counts: NDArray[np.int64], left_out: int) -> None:
    """Write a dictionary. The file appears under its name when complete.

    Args:
        texts: binary ``[n]``, distinct, in the order of their ids.
        counts: int64 ``[n]``, occurrences.
        left_out: occurrences of strings that are not in it.

    Raises:
        InputError: a string is not UTF-8, or the file cannot be written.
    """
    try:
        texts = texts.cast(pa.string())
    except pa.ArrowInvalid:
        raise InputError(
            f"{path}: a dictionary holds UTF-8 text, got a string of other bytes: hash the strings instead"
        ) from None
    table = pa.table(
        {
            "id": np.arange(len(texts) + 1),
            "count": np.concatenate([[left_out], counts]),
            "text": pa.concat_arrays([pa.array([""]), texts]),
        }
    )
    with written_whole(path) as partial, pa.OSFile(os.fsencode(partial), "wb") as sink:
        pyarrow.csv.write_csv(table, sink)
