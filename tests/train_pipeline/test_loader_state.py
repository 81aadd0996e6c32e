"""Loaders with state, without, and with methods for it that fail: all train, and resume where they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagpipe.train_pipeline.loader_state import LoaderState
from tests.train_pipeline.small import assert_same, batches, pipeline, state_of


class Loader:
    """A loader without state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(8))


class Prepared(Loader):
    """As accelerate prepares a loader that is not stateful."""

    def state_dict(self) -> Any:
        return self.dl_state_dict  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)  # type: ignore[attr-defined]


class Unwilling(Loader):
    def state_dict(self) -> Any:
        raise RuntimeError("only\nwith stateful=True")

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("only with stateful=True")


class ByProperty(Loader):
    """Its properties are not there, or cannot be read."""

    state_dict = property(lambda self: self.inner.state_dict)
    load_state_dict = property(lambda self: {}["load"])


class WithValues(Loader):
    state_dict = "next"
    load_state_dict = None


FAILING = (Prepared, Unwilling, ByProperty, WithValues)


@pytest.mark.parametrize("kind", FAILING)
def test_a_loader_whose_state_cannot_be_read_has_none(
    kind: type[Loader], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"checkpoint_dir": str(tmp_path), "store": f"memory://{kind.__name__}"}
    with pipeline(**where) as trained:
        for number, _ in enumerate(trained.train(kind())):
            if number == 2:
                trained.save()
                break
    with pipeline(**where) as trained:
        assert trained.position == 3
        assert len(list(trained.train(kind()))) == 5
        list(trained.train(kind()))
        state = state_of(trained)
    with pipeline() as trained:
        for _ in range(2):
            list(trained.train(Loader()))
        assert_same(state, state_of(trained))
    lines = [line for line in capsys.readouterr().err.splitlines() if "state_dict of the" in line]
    assert len(lines) == (2 if kind in (Prepared, Unwilling) else 0)  # one of each pipeline


def test_a_state_is_read_after_each_batch_and_its_later_failures_are_errors() -> None:
    class Counting(Loader):
        taken = 0

        def state_dict(self) -> Any:
            self.taken += 1
            if self.taken == 3:
                raise KeyError("lost")
            return {"taken": self.taken}

        def load_state_dict(self, state: Any) -> None:
            self.taken = state["taken"]

    state = LoaderState(loader := Counting(), set())
    assert state.is_kept
    assert [state.read(), state.read()] == [{"taken": 1}, {"taken": 2}]
    with pytest.raises(KeyError, match="lost"):
        state.read()
    state.load({"taken": 7})
    assert loader.taken == 7


def test_a_failure_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    noted: set[str] = set()
    for _ in range(2):
        state = LoaderState(Unwilling(), noted)
        assert state.read() is None
        assert not state.is_kept
        assert state.read() is None
    assert capsys.readouterr().err == (
        "note: state_dict of the Unwilling fails (RuntimeError: only with stateful=True): its batches are counted, and "
        "a resume leaves out those that are trained\n"
    )
