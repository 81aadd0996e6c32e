"""`zipf_ids`: ids with the skew of click logs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["zipf_ids"]

#: Exponent of the law of popularity: about 1 % of the rows get 80 % of the accesses.
_EXPONENT = 1.05


def zipf_ids(generator: np.random.Generator, count: int, num_rows: int) -> NDArray[np.int64]:
    """Ids below `num_rows`, int64 ``[count]``; small ones are frequent (inverse of a continuous power law)."""
    power = 1.0 - _EXPONENT
    drawn = ((float(num_rows) ** power - 1.0) * generator.random(count) + 1.0) ** (1.0 / power)
    found: NDArray[np.int64] = np.minimum(drawn.astype(np.int64) - 1, num_rows - 1)
    return found
