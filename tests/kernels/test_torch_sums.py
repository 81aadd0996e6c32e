"""Segment sums in plan order, whole and in chunks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.upload import Uploader
from bagpipe.kernels.segment_sum import HostSegmentSum
from bagpipe.kernels.torch_sums import sum_block, sum_rows

CPU = torch.device("cpu")
UPLOAD = Uploader(CPU, torch.float64)


@st.composite
def sums_and_vectors(draw: st.DrawFn) -> tuple[HostSegmentSum, torch.Tensor]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = rng.integers(0, 4, size=draw(st.integers(0, 8)))
    num_terms, num_vectors = int(lengths.sum()), 5
    segment_sum = HostSegmentSum(
        row_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sources=rng.integers(0, num_vectors, size=num_terms).astype(np.int32),
        coefficients=rng.standard_normal(num_terms) if draw(st.booleans()) else None,
        occurrences=rng.permutation(num_terms).astype(np.int32),
    )
    return segment_sum, torch.from_numpy(rng.standard_normal((num_vectors, 3)))


@given(sums_and_vectors(), st.integers(0, 2**32))
def test_selected_rows_have_the_same_bits(drawn: tuple[HostSegmentSum, torch.Tensor], seed: int) -> None:
    host, vectors = drawn
    segment_sum = UPLOAD.segment_sum(host)
    together = sum_block(vectors, segment_sum, 0, len(segment_sum))
    for row in range(len(segment_sum)):
        factors = np.ones(len(host.sources)) if host.coefficients is None else host.coefficients
        terms = range(host.row_starts[row], host.row_starts[row + 1])
        expected = sum(
            (factors[p] * vectors[host.sources[p]] for p in terms), start=torch.zeros(3, dtype=torch.float64)
        )
        torch.testing.assert_close(together[row], expected)
    rows = np.random.default_rng(seed).permutation(len(segment_sum))
    selected = UPLOAD.segment_sum(host.select(rows))
    assert torch.equal(sum_block(vectors, selected, 0, len(selected)), together[torch.from_numpy(rows)])
    half = len(selected) // 2
    blocks = [sum_block(vectors, selected, 0, half), sum_block(vectors, selected, half, len(selected))]
    assert torch.equal(torch.cat(blocks), together[torch.from_numpy(rows)])


@given(sums_and_vectors(), st.integers(0, 2**32), st.integers(2, 4))
def test_selected_rows_have_the_same_bits_in_chunks(
    drawn: tuple[HostSegmentSum, torch.Tensor], seed: int, max_terms: int
) -> None:
    """The chunks of a row depend on its own terms only, not on other rows or its position."""
    host, vectors = drawn
    upload = Uploader(CPU, torch.float64, max_terms=max_terms)
    together = sum_rows(vectors, upload.segment_sum(host))
    rows = np.random.default_rng(seed).permutation(len(together))
    rows = rows[: len(rows) // 2]
    assert torch.equal(sum_rows(vectors, upload.segment_sum(host.select(rows))), together[torch.from_numpy(rows)])


def test_per_id_weights_replace_coefficients() -> None:
    host = HostSegmentSum(
        row_starts=np.array([0, 2, 3], np.int32),
        sources=np.array([0, 1, 1], np.int32),
        occurrences=np.array([2, 0, 1], np.int32),
    )
    vectors, weights = torch.tensor([[1.0], [10.0]]), torch.tensor([0.5, 3.0, 7.0])
    assert sum_block(vectors, UPLOAD.segment_sum(host), 0, 2, weights).tolist() == [[12.0], [30.0]]
