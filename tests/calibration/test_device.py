from __future__ import annotations

import torch

from bagpipe.calibration.device import measure_device


def test_the_processor_and_its_threads():
    before = torch.get_num_threads()
    device = measure_device(threads=1)
    assert torch.get_num_threads() == before
    assert set(device.flops) == {"float32", "float64"}
    assert min(*device.flops.values(), device.call_s, device.memory_bytes_per_s, device.memory_bytes) > 0
