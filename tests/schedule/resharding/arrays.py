"""Reshardings of numpy arrays: every message is carried out, and a rank sends only what it has."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.schedule.resharding.layouts import LAYOUT_KINDS, Layout
from bagpipe.schedule.resharding.plan import Resharding

__all__ = ["carry_out", "layout", "layouts", "sides", "whole"]


def whole(rows: int, columns: int) -> NDArray[np.float64]:
    """A tensor whose elements all differ."""
    return np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)


def layout(kind: str, first: int, count: int, shares: tuple[int, ...] = ()) -> Layout:
    """A layout on the ranks from `first`."""
    assert kind in LAYOUT_KINDS
    return Layout(kind=kind, ranks=tuple(range(first, first + count)), shares=shares)


@st.composite
def layouts(draw: st.DrawFn, *, first: int = 0, most: int = 4) -> Layout:
    """A layout on 1 to `most` ranks, with equal shares or with shares of 0 to 3."""
    kind = draw(st.sampled_from(LAYOUT_KINDS))
    count = draw(st.integers(1, most))
    shares: tuple[int, ...] = ()
    if kind != "replicated" and draw(st.booleans()):
        shares = tuple(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count).filter(any)))
    return layout(kind, first, count, shares)


@st.composite
def sides(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts; their ranks are apart, or overlap."""
    return draw(layouts()), draw(layouts(first=draw(st.sampled_from((4, 4, 2, 0)))))


def carry_out(resharding: Resharding) -> bool:
    """Whether every rank of the target ends with its part, by the messages alone."""
    rows, columns = resharding.rows, resharding.columns
    tensor = whole(rows, columns)
    ranks = {*resharding.source.ranks, *resharding.target.ranks}
    held = {rank: np.full((rows, columns), np.nan) for rank in ranks}
    for rank, box in zip(resharding.source.ranks, resharding.source.boxes(rows, columns), strict=True):
        held[rank][box.index] = tensor[box.index]
    for message in resharding.messages():
        index = resharding.broadcasts[message.broadcast].task.box.index
        piece = held[message.sender][index].reshape(-1)[message.first : message.end]
        assert message.elements
        assert not np.isnan(piece).any(), "a rank sends what it does not have"
        taken = held[message.receiver][index].reshape(-1)
        assert np.isnan(taken[message.first : message.end]).all(), "a rank is sent what it has"
        taken[message.first : message.end] = piece
        held[message.receiver][index] = taken.reshape(held[message.receiver][index].shape)
    parts = zip(resharding.target.ranks, resharding.target.boxes(rows, columns), strict=True)
    return all(np.array_equal(held[rank][box.index], tensor[box.index]) for rank, box in parts)
