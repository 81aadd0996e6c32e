"""`PlannerProcess`: its plans, its errors, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.protocol import SLACK
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch
from tests.lookahead.streams import Counted, batch_of, batches_of, expected_parts, plain_part, spec_of
from tests.oracle.batches import traces

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def planner() -> Iterator[PlannerProcess]:
    """One process for the tests that do not end it."""
    with PlannerProcess(spec_of(), ring_bytes=1 << 12) as planner:
        yield planner


def indexes(planner: PlannerProcess, batches: Iterator[Batch]) -> Iterator[int]:
    return (part.batch.index for part in planner.run(batches))


@settings(max_examples=50, deadline=None)
@given(trace=traces(max_ranks=1))
def test_plans_are_those_of_the_oracle(planner: PlannerProcess, trace: tuple[OracleSpec, list[Batch]]) -> None:
    planner.spec, batches = trace
    found = list(planner.run(batches))
    assert [plain_part(part) for part in found] == expected_parts(batches, planner.spec)
    assert all(part.batch is batch for part, batch in zip(found, batches, strict=True))
    planner.spec = spec_of()


@settings(max_examples=20, deadline=None)
@given(trace=traces(max_batches=5))
def test_plans_for_all_ranks(planner: PlannerProcess, trace: tuple[OracleSpec, list[Batch]]) -> None:
    planner.spec, batches = trace
    plans = list(planner.plan_all(batches, 0, lambda batch: None))
    for rank in range(planner.spec.world_size):
        found = [plain_part(plan.part(rank, batch)) for plan, batch in zip(plans, batches, strict=True)]
        assert found == expected_parts(batches, planner.spec, rank)
    planner.spec = spec_of()


def test_batches_larger_than_the_ring(planner: PlannerProcess) -> None:
    planner.spec = spec_of(num_slots=100)
    batches = batches_of(12, size=3000)
    assert [plain_part(part) for part in planner.run(batches)] == expected_parts(batches, planner.spec)
    planner.spec = spec_of()


@pytest.mark.parametrize(("num_slots", "window"), [(20, 3), (0, 1)])
def test_holds_a_window_and_the_slack(planner: PlannerProcess, num_slots: int, window: int) -> None:
    planner.spec = spec_of(num_slots=num_slots)
    counted = Counted(batches_of(15))
    for _ in planner.run(counted):
        counted.held -= 1
    assert (counted.held, counted.most_held) == (0, window + SLACK)
    assert planner.max_held == window + SLACK
    planner.spec = spec_of()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_closed_run_leaves_nothing_to_the_next(planner: PlannerProcess, taken: int) -> None:
    unfinished = planner.run(batches_of(9))
    assert len([next(unfinished) for _ in range(taken)]) == taken
    unfinished.close()
    found = list(planner.run(batches_of(9)))
    assert [plain_part(part) for part in found] == expected_parts(batches_of(9), planner.spec)


def test_first_batch(planner: PlannerProcess) -> None:
    assert [part.batch.index for part in planner.run(batches_of(9), first_batch=4)] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("count", [0, 2, 12])
def test_an_error_of_the_batches_comes_after_those_before(planner: PlannerProcess, count: int) -> None:
    error = KeyError("disk")

    def failing() -> Iterator[Batch]:
        yield from batches_of(count)
        raise error

    found: list[int] = []
    with pytest.raises(KeyError) as caught:
        found.extend(indexes(planner, failing()))
    assert caught.value is error
    assert found == list(range(count))


def test_a_bad_id_comes_after_the_batches_before(planner: PlannerProcess) -> None:
    found: list[int] = []
    with pytest.raises(InputError, match="100"):
        found.extend(indexes(planner, iter([*batches_of(4), batch_of(4, 100), *batches_of(9)[5:]])))
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 4, 20])
def test_the_error_of_a_large_batch_names_the_cache_that_its_window_needs(planner: PlannerProcess, count: int) -> None:
    planner.spec = spec_of(lookahead=9)
    counted = Counted(batch_of(index, *range(30 + index)) for index in range(count))
    last = min(count, 9) - 1
    with pytest.raises(CapacityError) as caught:
        list(planner.run(counted))
    assert str(caught.value) == (
        "batch 0 needs 30 unique rows but cache_rows is 20: raise cache_rows to at least "
        f"{30 + last}, the largest need up to batch {last}, or bring smaller batches"
    )
    planner.spec = spec_of()


def test_one_run_at_a_time_inside_the_context(planner: PlannerProcess) -> None:
    first = planner.run(batches_of(9))
    next(first)
    with pytest.raises(RuntimeError, match="one run at a time"):
        next(planner.run(batches_of(9)))
    first.close()
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        next(PlannerProcess(spec_of()).run([]))


def test_a_killed_process_is_one_clear_error_and_the_next_run_has_another() -> None:
    with PlannerProcess(spec_of()) as planner:
        run = planner.run(batches_of(50))
        next(run)
        pid = planner.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(JobError, match=r"^the planner process ended unexpectedly \(signal SIGKILL\)$"):
            list(run)
        assert len(list(planner.run(batches_of(9)))) == 9
        assert planner.pid != pid


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with PlannerProcess(spec_of()) as planner, pytest.raises(JobError, match="exit code 1"):
        list(planner.run(batches_of(9)))


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        PlannerProcess(spec_of()).open()
    assert set(os.listdir("/proc/self/fd")) == before


def test_leaving_the_context_ends_the_process() -> None:
    with PlannerProcess(spec_of()) as planner:
        next(planner.run(batches_of(9)))
        pid = planner.pid
        assert pid is not None
    assert planner.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_leaves_no_descriptor_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with PlannerProcess(spec_of()) as planner:
        list(planner.run(batches_of(5)))
        with pytest.raises(CapacityError):
            list(planner.run([batch_of(0, *range(30))]))
    assert set(os.listdir("/proc/self/fd")) == before


#: A user's script without a guard for ``__main__``, in a folder of its own.
SCRIPT = """
import sys
print("once")
import torch
from bagpipe.lookahead.planner_process import PlannerProcess
from tests.lookahead.streams import batches_of, spec_of
planner = PlannerProcess(spec_of())
planner.open()
run = planner.run(batches_of(50))
next(run)
print(planner.pid, flush=True)
sys.stdin.readline()
print(sum(1 for _ in run), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The running script and its planner process."""
    (tmp_path / "user.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "user.py")],
        env={**os.environ, "PYTHONPATH": root},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "once\n"
        yield process, int(process.stdout.readline())
        process.kill()


def test_the_process_ends_with_a_killed_parent(script: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = script
    handle = os.pidfd_open(pid)
    process.kill()
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(30_000)
    os.close(handle)


def test_signals_are_for_the_training_process(script: tuple[subprocess.Popen[str], int]) -> None:
    process, pid = script
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert process.communicate("go\n")[0] == "49\n"
    assert process.returncode == 0


def test_the_process_maps_no_torch(script: tuple[subprocess.Popen[str], int]) -> None:
    maps = Path(f"/proc/{script[1]}/maps").read_text()
    assert "numpy" in maps
    assert "torch" not in maps
