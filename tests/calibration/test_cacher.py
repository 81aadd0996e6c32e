from __future__ import annotations

import pytest

from bagpipe.calibration.cacher import measure_cacher


@pytest.mark.multiproc
def test_ids_of_a_second():
    assert measure_cacher(2) > 0
