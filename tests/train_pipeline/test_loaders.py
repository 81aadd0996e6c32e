"""Loaders of torch, with workers that work, fail and die. In a process of their own: torch forks workers."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.train_pipeline.small import batches, pipeline

_PROGRAM = """
import json, os, sys, torch
from torch.utils.data import DataLoader, Dataset
from tests.train_pipeline.small import batches, pipeline, state_of

class Items(Dataset):
    def __init__(self, mode):
        self.mode, self.batches = mode, batches(24)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        if number == 12 and self.mode == "raise":
            raise KeyError("the user's")
        if number == 12 and self.mode == "die":
            os.kill(os.getpid(), 9)
        return self.batches[number]

class Wide(Items):
    # Batches of many tensors, each in shared memory with a descriptor of its own.
    def __getitem__(self, number):
        return {**self.batches[number], **{str(n): torch.ones(4) for n in range(20)}}

def most_shared(strategy):
    torch.multiprocessing.set_sharing_strategy(strategy)
    most = {"files": 0, "mapped": 0}
    loader = DataLoader(Wide("work"), batch_size=None, num_workers=1, persistent_workers=True)
    with pipeline(lookahead=20) as trained:
        for _ in range(2):
            for _ in trained.train(loader):
                most["files"] = max(most["files"], len(os.listdir("/proc/self/fd")))
                most["mapped"] = max(most["mapped"], open("/proc/self/maps").read().count("/torch_"))
    return most

def total(trained):
    return sum(float(value.double().sum()) for value in state_of(trained).values())

def run(mode):
    with pipeline(planner="process") as trained:
        try:
            for _ in trained.train(DataLoader(Items(mode), batch_size=None, num_workers=2)):
                pass
        except (KeyError, RuntimeError) as error:
            print(type(error).__name__, " ".join(str(error).split())[:60], trained.step)
        else:
            with pipeline() as plain:
                list(plain.train(batches(24)))
                print(trained.step, total(trained) == total(plain))

if __name__ == "__main__":
    for mode in ("work", "raise", "die"):
        run(mode)
    for strategy in ("file_descriptor", "file_system"):
        print(json.dumps(most_shared(strategy)))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Lines of a loader whose workers work, of one with an error, of one with a death, and of one with many tensors."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=250, check=True)
    return done.stdout.splitlines()


@pytest.mark.multiproc
def test_a_loader_with_workers_gives_the_same_results(printed: list[str]) -> None:
    assert printed[0] == "24 True"


@pytest.mark.multiproc
def test_an_error_in_a_worker_comes_after_the_batches_before_it(printed: list[str]) -> None:
    assert printed[1].startswith("KeyError")
    assert printed[1].endswith(" 12")


@pytest.mark.multiproc
@pytest.mark.parametrize("line", [3, 4])
def test_batches_that_are_held_take_no_shared_memory(printed: list[str], line: int) -> None:
    """24 batches of 23 tensors, of which the loader itself holds a few: in both ways that torch shares memory."""
    most = json.loads(printed[line])
    assert max(most.values()) < 250


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "no more"), RuntimeError("received 0 items of ancdata"), OSError("other")]
)
def test_too_many_open_files_are_explained(error: Exception) -> None:
    def failing() -> Iterator[Any]:
        yield from batches(3)
        raise error

    with pipeline() as trained, pytest.raises(type(error)) as raised:
        for _ in trained.train(failing()):
            pass
    notes = getattr(raised.value, "__notes__", [])
    assert [("3 batches are held" in note, "lookahead" in note) for note in notes] == (
        [] if "other" in str(error) else [(True, True)]
    )


@pytest.mark.multiproc
def test_a_worker_that_dies_ends_training_with_torchs_error(printed: list[str]) -> None:
    # Of torch's signal handler, in the main thread, or of the loader that misses the worker, in a lane.
    assert re.search("RuntimeError DataLoader worker .*(killed by signal|exited unexpectedly)", printed[2])


@pytest.mark.parametrize("planner", ["process", "inline"])
@pytest.mark.parametrize(("lookahead", "prefetch_depth"), [(3, 4), (8, 1)])
def test_batches_held_are_bounded(planner: str, lookahead: int, prefetch_depth: int) -> None:
    """The bound of docs/own-loop.md: `lookahead + prefetch_depth + 11`."""
    held: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def made() -> Iterator[Any]:
        nonlocal most
        for number in range(50):
            batch = batches(1, seed=number)[0]
            held[:] = [reference for reference in held if reference() is not None]
            held.append(weakref.ref(batch["labels"]))
            most = max(most, len(held))
            yield batch

    with pipeline(planner=planner, lookahead=lookahead, prefetch_depth=prefetch_depth) as trained:
        list(trained.train(made()))
    assert most <= lookahead + prefetch_depth + 11
