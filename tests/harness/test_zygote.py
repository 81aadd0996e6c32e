from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagpipe.errors import JobError
from tests.harness.zygote import Zygote

pytestmark = pytest.mark.multiproc

PROGRAM = """
import os, signal, sys
from bagpipe.util.failpoints import hit

def main():
    print(*sys.argv[1:], os.environ.get("WHO"), flush=True)
    hit("after-fetch")
    if "wait" in sys.argv:
        signal.pause()
    sys.exit("bad" if "bad" in sys.argv else 0)
"""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    folder = tmp_path_factory.mktemp("zygote")
    (folder / "program.py").write_text(PROGRAM)
    with Zygote(["program"], folder) as zygote:
        yield zygote


def test_a_process_has_its_own_arguments_environment_and_streams(zygote: Zygote, tmp_path: Path) -> None:
    started = [
        zygote.start("program", ["a", "b"], streams=tmp_path / "first", environment={"WHO": "first"}),
        zygote.start("program", ["bad"], streams=tmp_path / "second"),
    ]
    assert [zygote.reap(item) for item in started] == [0, 1]
    assert [item.out.read_text() for item in started] == ["a b first\n", "bad None\n"]
    assert [item.error_lines() for item in started] == [[], ["bad"]]


def test_signals_and_ends(zygote: Zygote, tmp_path: Path) -> None:
    started = zygote.start("program", ["wait"], streams=tmp_path / "waiting")
    assert not started.has_ended()
    started.signal(signal.SIGKILL)
    assert started.has_ended(20)
    assert zygote.reap(started) == -signal.SIGKILL
    started.signal(signal.SIGKILL)  # the pid belongs to another process now: not sent
    assert zygote.reap(started) == -signal.SIGKILL


def test_crash_points_are_armed_after_the_fork(zygote: Zygote, tmp_path: Path) -> None:
    for number in range(2):
        streams, environment = tmp_path / str(number), {"BAGPIPE_CRASH_AT": "after-fetch"} if number == 0 else {}
        started = zygote.start("program", [], streams=streams, environment=environment)
        assert zygote.reap(started) == (-signal.SIGKILL if number == 0 else 0)


def test_a_module_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="could not import no_such_module"):
        Zygote(["no_such_module"], tmp_path).__enter__()
    assert "no_such_module" in capfd.readouterr().err
