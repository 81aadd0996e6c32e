"""Hypothesis strategies for cases of the kernels' conformance suite."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.kernels.conformance import DIMS, DTYPES, OPTIMIZERS, OTHER_DTYPE, Case

__all__ = ["cases"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    named = draw(st.booleans())
    has_half = any(other.endswith("16") for other in (dtype, OTHER_DTYPE[dtype] if named else dtype))
    return Case(
        seed=draw(st.integers(0, 2**32)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        dtype=dtype,
        rounding=draw(st.sampled_from(["nearest", "stochastic"])) if has_half else "nearest",
        dim=draw(st.sampled_from(DIMS)),
        max_rows=draw(st.integers(0, 9)),
        max_terms=draw(st.sampled_from([None, 2, 3])),
        spare=draw(st.integers(0, 1)),
        named=named,
    )
