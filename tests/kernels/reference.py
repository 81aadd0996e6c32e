"""Reference of the kernels in numpy: row by row, term by term, every operation rounded once and correctly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_optimizer import ADAM_BETAS, adam_rate
from bagpipe.kernels.segment_sum import HostSegmentSum

__all__ = ["Array", "optimizer_step", "row_sums", "segment_sum"]

Array = NDArray[Any]


def segment_sum(vectors: Array, sources: Array, factors: Array | None, start: int, end: int) -> Array:
    """The sum of the terms from `start` to `end`, first to last."""
    total = np.zeros(vectors.shape[1], vectors.dtype)
    for place in range(start, end):
        term = vectors[sources[place]]
        total = total + (term if factors is None else term * factors[place])
    return total


def row_sums(vectors: Array, sums: HostSegmentSum, factors: Array | None, max_terms: int | None) -> Array:
    """``[k, dim]``: sums of all rows; rows of more than `max_terms` terms in chunks, recursively."""
    out = [
        _in_chunks(vectors, sums.sources, factors, start, end, max_terms)
        for start, end in pairwise(sums.row_starts.tolist())
    ]
    return np.array(out, vectors.dtype).reshape(len(out), vectors.shape[1])


def _in_chunks(
    vectors: Array, sources: Array, factors: Array | None, start: int, end: int, max_terms: int | None
) -> Array:
    if max_terms is None or end - start <= max_terms:
        return segment_sum(vectors, sources, factors, start, end)
    partial = [
        segment_sum(vectors, sources, factors, first, min(first + max_terms, end))
        for first in range(start, end, max_terms)
    ]
    return _in_chunks(np.array(partial), np.arange(len(partial)), None, 0, len(partial), max_terms)


def optimizer_step(name: str, weights: Array, state: Array, gradient: Array, numbers: RowStep) -> tuple[Array, Array]:
    """Updated weights and state; all ``[k, …]`` in the compute dtype."""
    kind, lr, eps = weights.dtype.type, numbers.lr, numbers.eps
    dim = weights.shape[1]
    if name == "sgd":
        return weights - gradient * kind(lr), state
    if name == "adagrad":
        state = state + gradient * gradient
        return weights - gradient / (np.sqrt(state) + kind(eps)) * kind(lr), state
    if name == "rowwise_adagrad":
        state = state + _halved(gradient * gradient) / kind(dim)
        return weights - gradient / (np.sqrt(state) + kind(eps)) * kind(lr), state
    if name == "momentum":
        state = state * kind(numbers.momentum) + gradient
        return weights - state * kind(lr), state
    if name == "ftrl":
        z, square = state[:, :dim], state[:, dim:]
        added = square + gradient * gradient
        z = z + (gradient - (np.sqrt(added) - np.sqrt(square)) / kind(lr) * weights)
        divisor = (np.sqrt(added) + kind(numbers.beta)) / kind(lr) + kind(numbers.l2)
        shrunk = np.abs(z) - kind(numbers.l1)
        moved = -np.sign(z) * (shrunk / np.where(shrunk > 0, divisor, 1))
        return np.where(shrunk > 0, moved, 0).astype(kind), np.concatenate([z, added], axis=1)
    beta1, beta2 = ADAM_BETAS
    first, second = state[:, :dim], state[:, dim:]
    first = first + (gradient - first) * kind(1 - beta1)
    second = second + (gradient * gradient - second) * kind(1 - beta2)
    change = first / (np.sqrt(second) + kind(eps)) * kind(adam_rate(lr, numbers.step))
    return weights - change, np.concatenate([first, second], axis=1)


def _halved(x: Array) -> Array:
    """``[k, 1]``: row sums; the width is halved repeatedly by adding the second half of the columns to the first."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = np.pad(x, ((0, 0), (0, width - x.shape[1])))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x
