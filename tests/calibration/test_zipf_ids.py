from __future__ import annotations

import numpy as np

from bagpipe.calibration.zipf_ids import zipf_ids


def test_a_few_rows_have_most_of_the_ids():
    ids = zipf_ids(np.random.default_rng(0), 100_000, 50_000)
    assert ids.dtype == np.int64
    assert ids.min() == 0
    assert ids.max() < 50_000
    assert (ids < 500).mean() > 0.5
    assert np.array_equal(ids, zipf_ids(np.random.default_rng(0), 100_000, 50_000))
