"""Synthetic click logs from a seed: skewed ids, counts, and labels that a model can learn. Blocks are pure functions.

    (seed, block) ──Philox──> uniforms ──zipf──> ranks ──scramble──> ids ─┐
                                       ──log-normal──> counts ────────────┼─ label model ──> labels
                                                                          └──> Columns, or Criteo's text
Without a schema the data has Criteo's shape, with the skews of `data.criteo_skew`. A schema TOML can hold

    [synthetic]
    rows = 200000              # examples
    label_rate = 0.25          # expected share of label 1
    profile = "criteo-kaggle"  # without own columns: ids at full scale; or "criteo-sample"
    rows_per_day = 20000       # of data with times: the examples come one after the other, evenly, from 2026 on
    tables = 26                # without own columns: C1..Cn

    [synthetic.features.item]  # defaults: the skew of one of Criteo's columns
    vocabulary = 1000000
    exponent = 1.1             # see data.zipf for exponent, shift, head
    missing = 0.05             # share of empty bags
    bag = 8                    # mean ids in a bag
    bag_law = "poisson"        # fixed, poisson or geometric (both at least 1)

A label after the first is 1 for a share of the examples whose label before it is 1, as conversions follow clicks: with
the same chance, drawn anew. Weights of examples are exponential with mean 1.

Only uniforms come from numpy's generator, whose raw streams never change; other distributions are computed here.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.schema import DataSchema
from data.clock import Clock
from data.columns import Columns
from data.hashing import hash_ids, scramble40
from data.source import Block, Segment
from data.synthetic_labels import LabelModel, calibrate, dense_part, id_part
from data.synthetic_options import DEFAULT_ROWS_PER_DAY, SyntheticFeature, SyntheticOptions

__all__ = ["RawBlock", "SyntheticSource"]

#: Examples in a block: about 20 ms of drawing.
BLOCK_ROWS = 16_384

#: The first example's time: 2026-01-01 00:00:00 UTC.
_START_S = 1_767_225_600
_DAY_S = 86_400

#: Share of missing dense values, and medians and spreads (natural log) of the counts: typical of click logs.
_DENSE_MISSING = 0.1
_DENSE_MEDIANS = (1.0, 2.5, 2.0, 1.2, 7.0, 3.0, 1.5, 2.2, 3.6, 0.4, 0.8, 0.3, 1.4)
_DENSE_SPREADS = (1.0, 1.6, 1.1, 0.9, 1.8, 1.5, 1.3, 0.9, 1.2, 0.6, 0.8, 0.7, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawBlock:
    """A block before the dense transform.

    Attributes:
        labels: float32 ``[n]``, or ``[n, num_labels]``.
        counts: int64 ``[n, num_dense]``, 0 if missing.
        dense_present: bool ``[n, num_dense]``.
        ids: per feature, int64 ``[its occurrences]``.
        lengths: int32 ``[num_features, n]``.
        example_weights: float32 ``[n]``, or None when the examples have none.
    """

    labels: NDArray[np.float32]
    counts: NDArray[np.int64]
    dense_present: NDArray[np.bool_]
    ids: tuple[NDArray[np.int64], ...]
    lengths: NDArray[np.int32]
    example_weights: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSource:
    """Generated examples.

    Attributes:
        schema: columns.
        features: distribution of each feature of the schema, in its order.
        rows: examples.
        seed: of all draws.
        label_rate: expected share of label 1.
        rows_per_day: examples in 24 hours of their times.
        clock, reads_times: see `data.clock.Clocked`.
    """

    schema: DataSchema
    features: tuple[SyntheticFeature, ...]
    rows: int
    seed: int = 0
    label_rate: float = 0.25
    rows_per_day: int = DEFAULT_ROWS_PER_DAY
    clock: Clock | None = None
    reads_times: bool = False

    @classmethod
    def of(cls, options: SyntheticOptions, seed: int = 0) -> SyntheticSource:
        """The source of options."""
        return cls(
            schema=options.schema,
            features=options.features,
            rows=options.rows,
            seed=seed,
            label_rate=options.label_rate,
            rows_per_day=options.rows_per_day,
            clock=options.clock,
        )

    def with_times(self) -> SyntheticSource:
        """See `data.clock.Clocked`."""
        return dataclasses.replace(self, reads_times=True)

    @property
    def files(self) -> tuple[str, ...]:
        return ()

    @property
    def in_processes(self) -> bool:
        return True

    @property
    def multi_hot(self) -> frozenset[str]:
        names = zip(self.schema.features, self.features, strict=True)
        return frozenset(feature.name for feature, how in names if how.bag != 1)

    @property
    def bad_rows(self) -> str:
        return "stop"  # there are none

    @property
    def layout(self) -> str:
        return f"synthetic/{BLOCK_ROWS}/{self.rows}/{self.seed}"

    def segments(self) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                file="synthetic",
                start=start,
                stop=min(start + BLOCK_ROWS, self.rows),
                num_rows=min(BLOCK_ROWS, self.rows - start),
            )
            for start in range(0, self.rows, BLOCK_ROWS)
        )

    def blocks(self, segment: Segment) -> Iterator[Block]:
        yield Block(file=segment.file, start=segment.start, stop=segment.stop, num_rows=segment.num_rows)

    def locate(self, block: Block, row: int) -> str:
        return f"{block.file}: row {block.start + row} (from 0)"

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return segment.stop - segment.start

    def read(self, block: Block) -> Columns:
        raw = self.draw(block)
        # float64 log1p, rounded once: equals the text reader's result for the same counts.
        dense = np.log1p(raw.counts.astype(np.float64)).astype(np.float32)
        weights = None
        if any(feature.weighted for feature in self.schema.features):
            weights = np.ones(int(raw.lengths.sum()), np.float32)
        return Columns(
            labels=raw.labels,
            dense=dense,
            values=np.concatenate(raw.ids),
            lengths=raw.lengths,
            weights=weights,
            num_raw_rows=raw.labels.shape[0],
            bad_rows=np.zeros(0, np.int64),
            example_weights=raw.example_weights,
            times_s=self._times(block) if self.reads_times else None,
        )

    def _times(self, block: Block) -> NDArray[np.int64]:
        return _START_S + np.arange(block.start, block.stop, dtype=np.int64) * _DAY_S // self.rows_per_day

    def draw(self, block: Block) -> RawBlock:
        """The examples of a block. Always draws a whole block, so that `rows` decides only where the data ends."""
        drawn = self._draw_all(self.seed, block.start // BLOCK_ROWS)
        model = _model(dataclasses.replace(self, seed=0, rows=1, rows_per_day=1, clock=None, reads_times=False))
        chance = model.chance(drawn.dense_part, drawn.id_part)
        keep = block.stop - block.start
        return RawBlock(
            labels=self._labels(drawn, chance)[:keep],
            counts=drawn.counts[:keep],
            dense_present=drawn.dense_present[:keep],
            ids=tuple(ids[: int(drawn.lengths[f, :keep].sum())] for f, ids in enumerate(drawn.ids)),
            lengths=np.ascontiguousarray(drawn.lengths[:, :keep]),
            example_weights=None if drawn.weights is None else drawn.weights[:keep],
        )

    def _labels(self, drawn: _Drawn, chance: NDArray[np.float64]) -> NDArray[np.float32]:
        """float32 ``[BLOCK_ROWS]``, or ``[BLOCK_ROWS, num_labels]``."""
        first = drawn.uniforms < chance
        if not drawn.more_uniforms:
            return first.astype(np.float32)
        columns = [first]
        for uniforms in drawn.more_uniforms:
            columns.append(columns[-1] & (uniforms < chance))
        return np.stack(columns, axis=1).astype(np.float32)

    def _draw_all(self, seed: int, number: int) -> _Drawn:
        """Block `number` of the data with this seed, before labels are drawn."""
        key = np.array([seed & (2**64 - 1), number], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        counts, dense_present = self._draw_dense(generator)
        ids, lengths = [], np.empty((len(self.features), BLOCK_ROWS), np.int32)
        effects = np.zeros(BLOCK_ROWS)
        for position, feature in enumerate(self.features):
            lengths[position] = feature.draw_lengths(generator, BLOCK_ROWS)
            ids.append(self._draw_ids(position, generator, int(lengths[position].sum())))
            effects += id_part(self.schema.features[position].table, ids[-1], lengths[position])
        uniforms = generator.random(BLOCK_ROWS)
        more_uniforms = tuple(generator.random(BLOCK_ROWS) for _ in self.schema.labels[1:])
        weights = None
        if self.schema.example_weight:
            weights = (-np.log1p(-generator.random(BLOCK_ROWS))).astype(np.float32)
        return _Drawn(
            counts=counts,
            dense_present=dense_present,
            ids=ids,
            lengths=lengths,
            dense_part=dense_part(counts, dense_present),
            id_part=effects,
            uniforms=uniforms,
            more_uniforms=more_uniforms,
            weights=weights,
        )

    def _draw_dense(self, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        shape = (BLOCK_ROWS, len(self.schema.dense))
        normal = np.sqrt(-2.0 * np.log1p(-generator.random(shape)))
        normal *= np.cos(2.0 * np.pi * generator.random(shape))  # Box and Muller
        normal *= np.resize(_DENSE_SPREADS, shape[1])
        normal += np.resize(_DENSE_MEDIANS, shape[1])
        present = generator.random(shape) >= _DENSE_MISSING
        counts = np.minimum(np.exp(normal), 1e9).astype(np.int64)
        counts[~present] = 0
        return counts, present

    def _draw_ids(self, position: int, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        table = self.schema.table(self.schema.features[position].table)
        ranks = self.features[position].law.ranks(generator.random(count))
        if table.rows is not None and not table.hash:
            return ranks
        ids = scramble40(ranks, zlib.crc32(table.name.encode()))
        return hash_ids(ids, table.rows) if table.rows is not None else ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """A whole block and the parts of its logits; the labels follow from `uniforms`, then `more_uniforms`."""

    counts: NDArray[np.int64]
    dense_present: NDArray[np.bool_]
    ids: list[NDArray[np.int64]]
    lengths: NDArray[np.int32]
    dense_part: NDArray[np.float64]
    id_part: NDArray[np.float64]
    uniforms: NDArray[np.float64]
    more_uniforms: tuple[NDArray[np.float64], ...]
    weights: NDArray[np.float32] | None


@lru_cache(maxsize=8)
def _model(source: SyntheticSource) -> LabelModel:
    """The label model of a source, calibrated on a block that no source serves: the same for every seed and size."""
    sample = source._draw_all(0, 2**64 - 1)
    return calibrate(sample.dense_part, sample.id_part, source.label_rate)
