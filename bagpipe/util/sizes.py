"""`bytes_of`: a number of bytes as people write it: 16e9, 16GB, 16GiB."""

from __future__ import annotations

import math
import re

from bagpipe.errors import InputError

__all__ = ["bytes_of"]

_SIZE = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?) ?([kKMGT]?)(i?)B?")


def bytes_of(flag: str, text: str) -> float:
    """Bytes; infinite for "inf".

    Args:
        flag: named in the error.
        text: a number with k, M, G or T (powers of 1000) or Ki, Mi, Gi or Ti (of 1024), and B or not.

    Raises:
        InputError: anything else, or nothing above 0.
    """
    if text == "inf":
        return math.inf
    match = _SIZE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        value = float(match[1]) * float((1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    except ValueError:
        raise InputError(f"{flag}: expected bytes such as 16e9, 16GB or 16GiB, got {text!r}") from None
    if not 0 < value < math.inf:
        raise InputError(f"{flag}: expected more than 0 bytes, got {text!r}")
    return value
