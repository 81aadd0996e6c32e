"""Conformance suite of readers: resumable at every position, and independent of how blocks are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bagpipe.types.batch import Batch
from data.loader import LookaheadLoader
from data.source import Source, check_bad_rows

__all__ = ["assert_same_batches", "check_resume", "check_source", "read_all"]

MakeLoader = Callable[[dict[str, Any] | None], LookaheadLoader]


def assert_same_batches(got: Iterable[Batch], expected: Iterable[Batch]) -> None:
    """Raise AssertionError naming the first batch and field that differ, bit for bit and type for type.

    Ignores `Batch.reader_state`, which names the source's layout: different sources can hold the same batches.
    """
    for left, right in zip(got, expected, strict=True):
        for item in dataclasses.fields(Batch):
            if item.name == "reader_state":
                continue
            a, b = getattr(left, item.name), getattr(right, item.name)
            if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
                same = (
                    isinstance(a, np.ndarray)
                    and isinstance(b, np.ndarray)
                    and a.dtype == b.dtype
                    and a.shape == b.shape
                )
                same = same and a.tobytes() == b.tobytes()
            else:
                same = a == b
            assert same, f"batch {right.index}: {item.name} differs:\n{a}\n{b}"


def read_all(loader: LookaheadLoader) -> list[Batch]:
    """Every batch of a loader that is not yet entered."""
    with loader:
        return list(loader)


def check_resume(make_loader: MakeLoader) -> list[Batch]:
    """Restore at every position, the first and the last included, and compare the remaining batches and the skipped
    rows.

    Args:
        make_loader: makes a fresh loader with the given state (None: from the beginning).

    Returns:
        all batches of an uninterrupted run.
    """
    batches, states, skipped = [], [], []
    with make_loader(None) as loader:
        states.append(loader.state())
        for batch in loader:
            batches.append(batch)
            states.append(loader.state())
        skipped = [state["skipped"] for state in states]
        total = loader.skipped_rows()
    for position, state in enumerate(states):
        state = json.loads(json.dumps(state))
        with make_loader(state) as loader:
            assert loader.state() == states[position], "restoring changes the position"
            assert loader.skipped_rows() == skipped[position], "restoring changes the number of skipped rows"
            tail = list(loader)
            assert_same_batches(tail, batches[position:])
            tail_states = [batch.reader_state for batch in tail]
            assert tail_states == states[position + 1 :], "restoring changes the reader states of batches"
            assert loader.skipped_rows() == total, "the tail skips another number of rows"
    return batches


def check_source(source: Source, batch_size: int = 7) -> None:
    """Check a reader's contract: resumable at every position in every order, split without loss, and rows located."""
    check_bad_rows(source.bad_rows)
    blocks = [block for segment in source.segments() for block in source.blocks(segment)]
    places = [source.locate(block, row) for block in blocks for row in (0, 1)]
    assert all(place.startswith(block.file) for block, place in zip(blocks, places[::2], strict=True)), places
    assert all(first != second for first, second in zip(places[::2], places[1::2], strict=True)), places
    for options in (
        {},
        {"shuffle": True, "seed": 3, "epochs": 2},
        {"shuffle": True, "shuffle_buffer": 2 * batch_size, "seed": 3, "epochs": 2},
        {"eval_fraction": 0.3, "limit": 3 * batch_size + 2},
        {"eval_fraction": 0.3, "limit": 3 * batch_size + 2, "shuffle": True, "epochs": 2},
        {"eval_fraction": 0.3, "phase": "eval"},
    ):
        settings: dict[str, Any] = {"batch_size": batch_size, **options}
        check_resume(lambda state, settings=settings: LookaheadLoader(source, state=state, **settings))  # type: ignore[misc]
    whole = read_all(LookaheadLoader(source, batch_size=batch_size))
    train = read_all(LookaheadLoader(source, batch_size=batch_size, eval_fraction=0.25))
    held_out = read_all(LookaheadLoader(source, batch_size=batch_size, eval_fraction=0.25, phase="eval"))
    joined = np.concatenate([batch.dense for batch in train + held_out])
    assert joined.tobytes() == np.concatenate([batch.dense for batch in whole]).tobytes(), "the split loses rows"
