"""`StringIds`: how the strings of a table become 64-bit ids: by a hash, or by a dictionary file.

    hash        `data.string_hash`: no vocabulary; a table with `hash` and `rows` folds the ids further
    dictionary  `data.string_dictionary`: the string's number in the file, 0 for a string that is not in it

Formats without strings never import Arrow, so only `ids_of` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["StringIds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StringIds:
    """The rule by which strings of a table become ids. A record of settings: dictionaries are read where they are used.

    Attributes:
        seed: of the hash; from 0 to 2**64 - 1.
        dictionary: path of the dictionary file; empty: strings are hashed.
    """

    seed: int = 0
    dictionary: str = ""

    def ids_of(self, strings: Any) -> NDArray[np.int64]:
        """The id of each string, int64 ``[n]``.

        Args:
            strings: a pyarrow array of strings or binary, without nulls.

        Raises:
            InputError: the dictionary file is missing or damaged.
        """
        from data.string_dictionary import dictionary_at
        from data.string_hash import as_binary, hash_strings

        if self.dictionary:
            return dictionary_at(self.dictionary).ids_of(as_binary(strings))
        return hash_strings(strings, self.seed)
