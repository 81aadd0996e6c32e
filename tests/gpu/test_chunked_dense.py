"""The dense part in chunks on the device: the bits of the model without chunks, and no more memory than the budget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.executor import EagerExecutor
from bagpipe.pipeline.devices import open_streams
from bagpipe.training.chunked_weights import ChunkedWeights
from bagpipe.training.part import LoopRun
from bagpipe.training.weights import ResidentWeights
from bagpipe.training.whole_dense import WholeDense

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 256, 8


def train(device: str, budget: Budget | None) -> list[Tensor]:
    """Parameters on the host after some batches."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    chunked = None if budget is None else ChunkedModel.of(model, optimizer, budget, open_streams(device))
    if chunked is not None:
        chunked.start()
    for number in range(6):
        values = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
        if chunked is None:
            model(values).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        chunked.begin()
        with chunked.computing():
            loss = model(values).square().mean()
        loss.backward()
        chunked.step(lambda parameters: optimizer.step())
        chunked.finish()
    if chunked is not None:
        assert chunked.arena.peak_bytes <= chunked.arena.num_slots * chunked.arena.chunk_bytes
        chunked.end()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("slots", [4, 8, 100])
def test_chunks_keep_the_bits_on_the_device(device: str, slots: int) -> None:
    chunk_bytes = 4 * WIDTH * WIDTH + 4096
    plain, found = train(device, None), train(device, Budget(num_bytes=slots * chunk_bytes, chunk_bytes=chunk_bytes))
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def test_losses_are_summed_on_the_device(device: str) -> None:
    """Between runs the parameters lie on the host."""
    model = nn.Linear(2, 1).to(device)
    weights = ChunkedWeights(
        ResidentWeights(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        budget=Budget(num_bytes=1024),
        streams=open_streams(device),
    )
    dense = WholeDense(weights=weights, executor=EagerExecutor(model))
    dense.start(LoopRun(batches=iter(()), parts=()))
    assert dense.loss_sums()["model"].device.type == torch.device(device).type
    dense.end()
