"""The model of synthetic labels: logistic in the dense values and in one fixed effect per id.

    counts ──log, alternating signs──> dense part ──┐ each scaled to its share of the logit
    ids ──mix64──> effect per id, summed ─> id part ┴─> + bias ──sigmoid──> probability of label 1

`calibrate` finds the scales and the bias on a sample, so that the logit has the wanted spread and the labels the wanted
mean for any skew of the ids.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.hashing import mix64

__all__ = ["LabelModel", "calibrate", "dense_part", "id_part"]

Floats = NDArray[np.float64]

#: Standard deviations of the two parts of the logit. The true model has an AUC of 0.84; the effects of rare ids cannot
#: be learnt, so least squares on dense values and click rates per id reaches 0.71 with 65,000 examples.
DENSE_SIGNAL = 1.1
ID_SIGNAL = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelModel:
    """Logit = dense_scale * dense part + id_scale * id part + bias."""

    dense_scale: float
    id_scale: float
    bias: float

    def chance(self, dense: Floats, ids: Floats) -> Floats:
        """float64 ``[n]``, probability of label 1."""
        logit = self.dense_scale * dense + self.id_scale * ids + self.bias
        result: Floats = 1.0 / (1.0 + np.exp(-logit))
        return result


def dense_part(counts: NDArray[np.int64], present: NDArray[np.bool_]) -> Floats:
    """float64 ``[n]`` from counts ``[n, num_dense]``: logarithms with alternating signs; missing values add 0."""
    signs = np.where(np.arange(counts.shape[1]) % 3 > 0, 1.0, -1.0)
    total: Floats = (np.log1p(counts) * present) @ signs
    return total


def id_part(table: str, ids: NDArray[np.int64], lengths: NDArray[np.int32]) -> Floats:
    """float64 ``[n]``: the fixed effects (uniform, mean 0) of a bag's ids, their sum over the root of its size."""
    salt = np.uint64(zlib.crc32(table.encode()) << 32)
    words = mix64(ids.view(np.uint64) ^ salt)
    effects = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    rows = np.repeat(np.arange(lengths.size), lengths)
    total = np.bincount(rows, weights=effects, minlength=lengths.size)
    scaled: Floats = total / np.sqrt(np.maximum(lengths, 1))
    return scaled


def calibrate(dense: Floats, ids: Floats, rate: float) -> LabelModel:
    """The model with the wanted logit spread and mean probability `rate` on this sample of parts."""
    dense_scale = DENSE_SIGNAL / (float(dense.std()) or 1.0)
    id_scale = ID_SIGNAL / (float(ids.std()) or 1.0)
    logit = dense_scale * dense + id_scale * ids
    low, high = -100.0 - float(logit.max()), 100.0 - float(logit.min())
    for _ in range(60):  # bisection: the mean probability rises with the bias
        bias = (low + high) / 2.0
        mean = float((1.0 / (1.0 + np.exp(np.clip(-(logit + bias), -700.0, 700.0)))).mean())
        low, high = (bias, high) if mean < rate else (low, bias)
    return LabelModel(dense_scale=dense_scale, id_scale=id_scale, bias=low)
