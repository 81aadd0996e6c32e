"""Activations on the host: the bits of those on the device, and the bytes that the row says."""

from __future__ import annotations

import pytest
import torch

from tests.pipeline.stage.walked_stage import ONE, ROWS, Stage, layers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("row", ["gpipe", "1f1b", "zero-bubble"])
def test_activations_keep_the_bits_on_the_device(device: str, row: str) -> None:
    stays, leaves = (Stage(ROWS[row], layers(), moves=moves, device=device) for moves in (False, True))
    for stage in (stays, leaves):
        stage.run()
    assert leaves.kept.peak_bytes == 2 * ONE < stays.kept.peak_bytes
    assert all(torch.equal(*pair) for pair in zip(stays.gradients, leaves.gradients, strict=True))
