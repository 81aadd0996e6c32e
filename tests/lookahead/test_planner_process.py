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

from bagpipe.errors import CapacityError, JobError
from bagpipe.lookahead.planner_process import PlannerProcess
from tests.lookahead.streams import batch_of, batches_of, spec_of

pytestmark = pytest.mark.multiproc


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
