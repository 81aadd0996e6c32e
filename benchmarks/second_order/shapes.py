"""Linear layers whose factors are counted by formula: of DLRMs, and of the kind of models that DP-KFAC's paper trains.

A convolution with C inputs and a k x k kernel has factor A of dimension C k² and factor G of its outputs: it is counted
here only, K-FAC of this project refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from bagpipe.dense.precondition.costs import LayerShape

__all__ = ["SHAPES", "bert_base", "chain", "dlrm", "resnet50"]

_SPARSE, _DENSE = 26, 13


def chain(widths: Sequence[int], *, bias: bool = True) -> list[LayerShape]:
    """Layers between widths."""
    return [LayerShape(num_inputs=inputs + bias, num_outputs=outputs) for inputs, outputs in pairwise(widths)]


def dlrm(bottom: Sequence[int], top: Sequence[int], dim: int) -> list[LayerShape]:
    """A DLRM of this project on Criteo's columns: a layer to the dimension of the rows follows the bottom MLP."""
    vectors = _SPARSE + 1
    return [*chain((_DENSE, *bottom, dim)), *chain((dim + vectors * (vectors - 1) // 2, *top, 1))]


def resnet50() -> list[LayerShape]:
    """He et al., CVPR 2016, table 1: a 7x7 convolution, 16 bottleneck blocks, a classifier."""
    layers = [LayerShape(num_inputs=3 * 49, num_outputs=64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            if block == 0:
                layers.append(LayerShape(num_inputs=inputs, num_outputs=4 * width))
            layers.append(LayerShape(num_inputs=inputs, num_outputs=width))
            layers.append(LayerShape(num_inputs=9 * width, num_outputs=width))
            layers.append(LayerShape(num_inputs=width, num_outputs=4 * width))
            inputs = 4 * width
    return [*layers, LayerShape(num_inputs=2049, num_outputs=1000)]


def bert_base() -> list[LayerShape]:
    """Linear layers of the 12 blocks of BERT-Base: four of attention, two of the feed-forward network."""
    attention = chain((768,) * 5)
    return [layer for _ in range(12) for layer in (*attention, *chain((768, 3072, 768)))]


#: By title.
SHAPES: Mapping[str, Sequence[LayerShape]] = {
    "small": dlrm((64, 32), (64, 32), 8),
    "large": dlrm((512, 256, 128), (1024, 1024, 512, 256), 128),
    "ResNet-50": resnet50(),
    "BERT-Base": bert_base(),
}
