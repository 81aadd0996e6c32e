"""Seeds of a stage's forward: a function of seed, batch, stage and first example, independent of execution order.

A recomputed forward draws the same random numbers. So does the same micro-batch on another rank or in another thread.
torch's default generator is process-wide, so seeded forwards run one at a time and restore its state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["alone", "mix_seed", "seeded"]

_GENERATOR = threading.RLock()
_MASK = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """63-bit hash of the numbers (splitmix64 finaliser, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


@contextmanager
def alone() -> Iterator[None]:
    """Inside, no other thread is in a seeded block: for what saves the default generator's state and restores it."""
    with _GENERATOR:
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the device's default generator inside the block, and restore its state afterwards."""
    with _GENERATOR:
        if device.type == "cuda":
            kept = torch.cuda.get_rng_state(device)
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        else:
            kept = torch.get_rng_state()
            torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_rng_state(kept, device)
            else:
                torch.set_rng_state(kept)
