"""Bytes and operations of K-FAC by formula, for models and numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bagpipe.dense.precondition.costs import KfacDivision, LayerShape, flops, kept_bytes, sent_bytes
from benchmarks.second_order.shapes import SHAPES

__all__ = ["BATCH_SIZES", "PERIODS", "RANKS", "cost_records", "rank_operations"]

RANKS = (2, 8, 64)
DIVISIONS: tuple[KfacDivision, ...] = ("local", "summed", "d-kfac")
#: Batches between two updates of the factors, and of the inverses.
PERIODS = ((1, 1), (1, 10), (10, 100))
#: Examples of a batch on one rank.
BATCH_SIZES = (512, 4096, 32768)
#: Examples that each rank has of a batch; of BERT tokens, eight sequences of 128. Places of an image are not counted.
RANK_EXAMPLES = {"small": 512, "large": 512, "BERT-Base": 1024}

_OPERATIONS = ("F", "B", "COV_A", "COV_G", "X_INV", "PRECOND")


def rank_operations(
    layers: Sequence[LayerShape],
    division: KfacDivision,
    *,
    num_ranks: int,
    rank: int,
    num_examples: int,
    factor_every: int,
    inverse_every: int,
) -> float:
    """Floating-point operations of the dense part on a rank in a step, on average.

    Args:
        layers: of the model, in order; rank l mod N owns layer l.
        division: how K-FAC is divided. Only `local` spares a rank the factors of the others' layers, and only `d-kfac`
            preconditions all gradients on every rank.
        num_ranks, rank: that hold the layers, and which of them.
        num_examples: that the rank has of a batch.
        factor_every, inverse_every: batches between two updates.
    """
    total = 0.0
    for number, layer in enumerate(layers):
        found, is_own = flops(layer, num_examples), number % num_ranks == rank
        total += found["F"] + found["B"]
        if is_own or division != "local":
            total += (found["COV_A"] + found["COV_G"]) / factor_every
        if is_own:
            total += found["X_INV"] / inverse_every
        if is_own or division == "d-kfac":
            total += found["PRECOND"]
    return total


def cost_records() -> dict[str, list[dict[str, Any]]]:
    """`bytes`, and `computation` of the rank with most, by model, ranks and division; `operations` of one rank."""
    return {"bytes": list(_bytes()), "computation": list(_computation()), "operations": list(_operations())}


def _bytes() -> Iterator[dict[str, Any]]:
    for title, layers in SHAPES.items():
        for ranks in RANKS:
            for division in DIVISIONS:
                kept = [kept_bytes(layers, division, num_ranks=ranks, rank=rank) for rank in range(ranks)]
                sent = {
                    f"sent {factor}/{inverse}": sent_bytes(
                        layers, division, num_ranks=ranks, factor_every=factor, inverse_every=inverse
                    )
                    for factor, inverse in PERIODS
                }
                gradients = 2 * 4 * sum(layer.weights for layer in layers) * (ranks - 1)  # a ring's all-reduce
                own = {"model": title, "ranks": ranks, "division": division, "kept": max(kept), "all_kept": sum(kept)}
                yield {**own, **sent, "gradients": gradients}


def _computation() -> Iterator[dict[str, Any]]:
    for title, examples in RANK_EXAMPLES.items():
        for ranks in RANKS:
            for division in DIVISIONS:
                found = {
                    f"{factor}/{inverse}": max(
                        rank_operations(
                            SHAPES[title],
                            division,
                            num_ranks=ranks,
                            rank=rank,
                            num_examples=examples,
                            factor_every=factor,
                            inverse_every=inverse,
                        )
                        for rank in range(ranks)
                    )
                    for factor, inverse in PERIODS
                }
                yield {"model": title, "ranks": ranks, "division": division, "examples": examples, **found}


def _operations() -> Iterator[dict[str, Any]]:
    for title in ("small", "large"):
        for size in BATCH_SIZES:
            found = [flops(layer, size) for layer in SHAPES[title]]
            yield {"model": title, "examples": size} | {name: sum(each[name] for each in found) for name in _OPERATIONS}
