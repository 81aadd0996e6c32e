"""The CPU fake of CUDA graphs: outputs stay in place, and work is repeated."""

from __future__ import annotations

import torch

from bagpipe.testing.repeated_calls import RepeatedCalls


def test_a_replay_reads_current_inputs_and_writes_the_same_memory() -> None:
    given = torch.ones(3)
    (recording,) = RepeatedCalls().record(lambda: [given * 2, given.sum()])
    double, total = recording.outputs
    assert torch.isnan(double).all()
    assert torch.isnan(total), "recording gives no results"
    recording.replay()
    assert double.tolist() == [2, 2, 2]
    given.fill_(5)
    recording.replay()
    assert double.tolist() == [10, 10, 10]
    assert float(total) == 15
    assert recording.outputs[0] is double
